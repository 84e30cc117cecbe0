// The file that a keeper, or a daemon that starts one, runs next.
#ifndef SUPEROFFLOAD_SERVER_HOST_OWN_PROGRAM_H_
#define SUPEROFFLOAD_SERVER_HOST_OWN_PROGRAM_H_

#include <string>

namespace superoffload::host {

// This process's program, or what an upgrade has put in its place: the libraries beside it are the new one's. Where
// nothing is there any more, /proc/self/exe still runs. May be called in a forked child of a single thread.
std::string OwnProgram();

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_OWN_PROGRAM_H_
