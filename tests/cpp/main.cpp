#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

// Nothing here loses power: a sync would only take the time of a hundred checks.
extern "C" int fdatasync(int) { return 0; }
extern "C" int fsync(int) { return 0; }
