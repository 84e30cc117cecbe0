#include "server/memory/give_back.h"

#include <malloc.h>

namespace superoffload::memory {

GivesBack::~GivesBack() {
  if (bytes_ >= kGiveBackBytes) ::malloc_trim(0);
}

}  // namespace superoffload::memory
