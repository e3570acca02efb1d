"""Reports of a run to its user: metrics, plots, progress, times, traces, memories that grow, processes that are late.

These files import the parts of a step, such as `train.config` and `train.state`, and not the loop.
"""
