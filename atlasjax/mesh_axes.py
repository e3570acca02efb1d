"""Names of the mesh axes, for all modules that split arrays. `distributed.mesh` creates the mesh."""

BATCH_AXES = ("data", "fsdp")  # split the batch
TIME_AXES = ("sequence",)  # splits the tokens of a sequence; a mesh has it only if its size is not 1
HEAD_AXES = ("tensor",)  # splits heads, MLP width and vocabulary
MESH_AXES = (*BATCH_AXES, *TIME_AXES, *HEAD_AXES)
