// Tells ThreadSanitizer what absl::Mutex and absl::Notification do.
//
// The distribution's abseil is compiled without instrumentation, so that ThreadSanitizer sees neither the locking nor
// the order it creates and reports every access under a mutex as a race. The linker's --wrap (tests/support/CMakeLists)
// sends our calls through the functions below, which say it. Conditions are evaluated by whichever thread unlocks,
// after it has told ThreadSanitizer that it does: their reads are left out.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {

// Of the ThreadSanitizer runtime; not declared in its headers.
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);

#define REAL(symbol) __real_##symbol
#define WRAP(symbol) __wrap_##symbol
#define LOCK _ZN4absl7debian35Mutex4LockEv
#define UNLOCK _ZN4absl7debian35Mutex6UnlockEv
#define AWAIT _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE
#define AWAIT_TIMEOUT _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE
#define DESTROY _ZN4absl7debian35MutexD1Ev
#define NOTIFY _ZN4absl7debian312Notification6NotifyEv
#define WAIT_NOTIFIED _ZNK4absl7debian312Notification19WaitForNotificationEv
#define WAIT_NOTIFIED_TIMEOUT _ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE
#define EXPAND(macro, symbol) macro(symbol)

void EXPAND(REAL, LOCK)(absl::Mutex*);
void EXPAND(REAL, UNLOCK)(absl::Mutex*);
void EXPAND(REAL, AWAIT)(absl::Mutex*, const absl::Condition&);
bool EXPAND(REAL, AWAIT_TIMEOUT)(absl::Mutex*, const absl::Condition&, absl::Duration);
void EXPAND(REAL, DESTROY)(absl::Mutex*);
void EXPAND(REAL, NOTIFY)(absl::Notification*);
void EXPAND(REAL, WAIT_NOTIFIED)(const absl::Notification*);
bool EXPAND(REAL, WAIT_NOTIFIED_TIMEOUT)(const absl::Notification*, absl::Duration);

void EXPAND(WRAP, LOCK)(absl::Mutex* mutex) {
  __tsan_mutex_pre_lock(mutex, 0);
  EXPAND(REAL, LOCK)(mutex);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

void EXPAND(WRAP, UNLOCK)(absl::Mutex* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  EXPAND(REAL, UNLOCK)(mutex);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_mutex_post_unlock(mutex, 0);
}

void EXPAND(WRAP, AWAIT)(absl::Mutex* mutex, const absl::Condition& condition) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  EXPAND(REAL, AWAIT)(mutex, condition);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_mutex_pre_lock(mutex, 0);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

bool EXPAND(WRAP, AWAIT_TIMEOUT)(absl::Mutex* mutex, const absl::Condition& condition, absl::Duration timeout) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  const bool met = EXPAND(REAL, AWAIT_TIMEOUT)(mutex, condition, timeout);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  __tsan_mutex_pre_lock(mutex, 0);
  __tsan_mutex_post_lock(mutex, 0, 0);
  return met;
}

void EXPAND(WRAP, DESTROY)(absl::Mutex* mutex) {
  EXPAND(REAL, DESTROY)(mutex);
  __tsan_mutex_destroy(mutex, __tsan_mutex_not_static);
}

void EXPAND(WRAP, NOTIFY)(absl::Notification* notification) {
  __tsan_release(notification);
  EXPAND(REAL, NOTIFY)(notification);
}

void EXPAND(WRAP, WAIT_NOTIFIED)(const absl::Notification* notification) {
  EXPAND(REAL, WAIT_NOTIFIED)(notification);
  __tsan_acquire(const_cast<absl::Notification*>(notification));
}

bool EXPAND(WRAP, WAIT_NOTIFIED_TIMEOUT)(const absl::Notification* notification, absl::Duration timeout) {
  const bool notified = EXPAND(REAL, WAIT_NOTIFIED_TIMEOUT)(notification, timeout);
  if (notified) __tsan_acquire(const_cast<absl::Notification*>(notification));
  return notified;
}

}  // extern "C"
