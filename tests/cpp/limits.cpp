#include "limits.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <cstdlib>
#include <new>

// In place of the C library's and the compiler's own.

using Run = void* (*)(void*);
using Create = int (*)(pthread_t*, const pthread_attr_t*, Run, void*);

// A sanitizer's, where it is linked in.
extern "C" __attribute__((weak)) int __interceptor_pthread_create(pthread_t*, const pthread_attr_t*, Run, void*);

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, Run run, void* argument) {
  if (kvtier::test::thread_refused()) return EAGAIN;
  static const Create create = __interceptor_pthread_create != nullptr
                                   ? __interceptor_pthread_create
                                   : reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, how, run, argument);
}

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return kvtier::test::allocation_refused() ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
