"""Names of the mesh axes, for all modules that split arrays. `distributed.mesh` creates the mesh."""

BATCH_AXES = ("data", "fsdp")  # split the batch
HEAD_AXES = ("tensor",)  # splits heads, MLP width and vocabulary
MESH_AXES = (*BATCH_AXES, *HEAD_AXES)
