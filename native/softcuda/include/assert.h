// The shim's assert fails the launch; the system's would end the process.
#ifdef NDEBUG
#undef assert
#define assert(condition) ((void)0)
#endif
