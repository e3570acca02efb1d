"""The folder of a run: checkpoints, their checksums, the lock, compiled programs.

These files import the parts of a step, such as `train.config` and `train.state`, and not the loop.
"""
