"""Names of the mesh axes, for all who split arrays over them. `distributed.mesh` makes the mesh."""

BATCH_AXES = ("data", "fsdp")  # split the batch
HEAD_AXES = ("tensor",)  # splits heads, MLP width and vocabulary
MESH_AXES = (*BATCH_AXES, *HEAD_AXES)
