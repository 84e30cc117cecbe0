// What GCC 12's libstdc++ has and GCC 11's lacks, so that programs that are built with GCC 12 run with either: RHEL 9
// has GCC 11's. std::condition_variable::wait got a new version (GLIBCXX_3.4.30) when it stopped to be a place where a
// thread is cancelled; this is its whole body.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

#if defined(__GLIBCXX__) && _GLIBCXX_RELEASE >= 12

void std::condition_variable::wait(std::unique_lock<std::mutex>& lock) {
  ::pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}

#endif
