// Takes the place of the system header. The shim's assert raises a fault on the device instead of
// aborting the process.
#ifdef NDEBUG
#undef assert
#define assert(condition) ((void)0)
#endif
