"""Names of the mesh axes, for all modules that split arrays. `distributed.mesh` creates the mesh."""

EXPERT_AXES = ("expert",)  # splits experts, and the batch; a mesh has it only if its size is not 1
BATCH_AXES = ("data", "fsdp", *EXPERT_AXES)  # split the batch
TIME_AXES = ("sequence",)  # splits the tokens of a sequence; a mesh has it only if its size is not 1
HEAD_AXES = ("tensor",)  # splits heads, MLP width and vocabulary
MESH_AXES = (*BATCH_AXES, *TIME_AXES, *HEAD_AXES)
OPTIONAL_AXES = (*EXPERT_AXES, *TIME_AXES)  # which a mesh has only if their size is not 1
