"""The soft device: a libcuda.so.1 that runs on the CPU, and its kernel compiler.

The library must be loaded (``RTLD_GLOBAL``) before ``cuda.bindings`` looks for a driver; kernels
come from :func:`compile.compile_cpu`. Rules it keeps are numbered in ``INVARIANTS.md``. It reads
these environment variables once:

====================== ==========================================================================
SOFTCUDA_WORKERS       device worker threads; default the usable cores, at most 16
SOFTCUDA_STRICT        1 (default): frees and unloads wait for all work, and host functions and
                       destructors that call the driver get NOT_PERMITTED; 0 turns both off
SOFTCUDA_DESTRUCTORS   ``late`` (default, own thread) or ``inline`` (in the destroying call)
SOFTCUDA_LOCK_MODEL    sum of 1 (a lock is held while a host function runs), 2 (cuLaunchHostFunc
                       waits for its stream), 4 (a kernel's first launch waits for the context)
SOFTCUDA_WATCHDOG      seconds after which a stuck call or host function ends the process with
                       status 86 and a description of who waits for whom
SOFTCUDA_POISON        1 fills fresh device memory with 0xff (NaN, -1)
SOFTCUDA_MEMOPS        0 makes every memory operation NOT_SUPPORTED
SOFTCUDA_ATTRIBUTE_<n> 0 makes device attribute n (92, 93, 94, 98, 122, 123, 148) 0, and what it
                       stands for NOT_SUPPORTED
SOFTCUDA_QUEUES        1 models one hardware queue: what becomes ready behind a pending wait waits
SOFTCUDA_LOG           1 prints refusals, faults and what is left at exit to standard error
====================== ==========================================================================
"""
