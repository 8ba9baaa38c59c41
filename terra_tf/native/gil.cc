#include "gil.h"

#include <exception>

namespace terra {
namespace {

std::terminate_handler g_terminate;

[[noreturn]] void Terminate() {
  // The thread that finalizes has the GIL or has lent it out; the others will not get it any more.
#if PY_VERSION_HEX >= 0x030D0000
  const bool finalizing = Py_IsFinalizing();
#else
  const bool finalizing = _Py_IsFinalizing();
#endif
  const bool finalizes = getpid() == gettid();
  while (finalizing && !finalizes) pause();
  g_terminate();
  abort();
}

}  // namespace

void OutliveFinalization() { g_terminate = std::set_terminate(Terminate); }

}  // namespace terra
