"""Device, memory, kernels, lanes, graphs and the host work in them.

Start at :func:`graft.cudagraph.device.open_device`. Importing this package loads no driver.
"""
