// Hides the system header: the shim's assert fails the launch instead of ending the process.
#ifdef NDEBUG
#undef assert
#define assert(condition) ((void)0)
#endif
