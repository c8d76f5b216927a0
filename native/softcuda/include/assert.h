// Takes the place of the system header in kernels that are compiled for the soft device. The assert
// of softcuda_shim.h raises a fault on the device instead of aborting the process.
#ifdef NDEBUG
#undef assert
#define assert(condition) ((void)0)
#endif
