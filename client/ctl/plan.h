// superoffloadctl plan: what training a model on a machine would take and how fast it would be.
#ifndef SUPEROFFLOAD_CLIENT_CTL_PLAN_H_
#define SUPEROFFLOAD_CLIENT_CTL_PLAN_H_

namespace superoffload::ctl {

// With the words after "plan". Asks the installed superoffloadd, or $SUPEROFFLOAD_DAEMON, and starts no daemon. Returns
// an exit status: 1 when it cannot be asked or has no step to draw, 2 when the command line, a file or the request is
// wrong, 3 when what is planned does not fit.
int RunPlan(int argc, char** argv);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_PLAN_H_
