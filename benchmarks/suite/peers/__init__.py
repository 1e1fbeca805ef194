"""The peers. Each module but `serve` is run as a process of its own, by an interpreter that has the
peer installed; the suite speaks to it as `serve` tells.
"""
