#!/usr/bin/env bash
# Builds with a sanitizer and runs the tests that fit into CI's time: everything in C++ but for most of the long exactness
# runs, and the Python integration tests of which the daemon is a part, with one built that way. The asan build has the
# fuzzers, too.
# Usage: tests/sanitizers.sh asan|tsan PYTHON RESULTS_DIRECTORY
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
source tests/support/runners.sh
preset="$1" python="$2" results="$3"
build="$PWD/build/$preset"

export ASAN_OPTIONS="abort_on_error=1:detect_stack_use_after_return=1" UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1"
# clang 14's leak checker may crash over the TLS of threads that end with the process.
export LSAN_OPTIONS="use_tls=0:suppressions=$PWD/tests/support/lsan.supp:print_suppressions=0"
export TSAN_OPTIONS="halt_on_error=1:ignore_noninstrumented_modules=1:suppressions=$PWD/tests/support/tsan.supp"
export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd"
# Threads of the fake GPU's kernels are those of CudaPackTest, which has its own.
export FAKE_CUDA_NO_THREADS=1

# Only what runs here, and for ThreadSanitizer only what has threads: simulations, plans and explorations have one.
programs=(superoffloadd superoffload-plan kernels_test kernels_gpu_test server_test client_test client_cpp_test client_gpu_test
  integration_test gpu_test)
[[ "$preset" == tsan ]] || programs+=(algorithms_test simulator_test peers_test plan_test ctl_test fault_simulator explore_agreement fuzzers)
cmake --preset "$preset" >/dev/null
ninja -C "$build" --quiet "${programs[@]}"
# Of the long exactness runs those with three worker threads and the policy that takes every path; nothing that simulates
# whole tables of a README or many runs to choose from, in one thread.
left_out='TablesTest|WhatMakesAStepShorterIsNamed|TuningTest|RecommendationTest|ResidentsAreThoseThatTrainersComeTo|/(Exactness|Recovery)Test.*(_[124]Threads|/(Always|Never)_)|KilledAgainAndAgainTrains.*_1Threads'
left_out+='|WholePathTest.*_(1|2|4)_|WholePathTest.*_3_BFloat16FromFloat32|RoomTest.*(_1Threads|_lion|_nearest)'
# Of the fake GPUs those whose copies take ways of their own; kernels in a process that dies do nothing else than in one
# that lives.
left_out+='|GpuExactnessTest.*/(Trainer|TrainerPasses|Direct|DaemonCoherent|TrainerNeverSpeculating|[A-Za-z]*SlowDown|AutoWithoutTheDaemon) '
left_out+='|GpuExactnessTest.*(Hmm|Unregistered|Mig)|UndoSlotTest'
# Nor residents where there are others with a log, or in place.
left_out+='|GpuExactnessTest.*/(DaemonResident|TrainerResident|DirectCoherentResident|DirectCoherentInPlaceResident|TrainerOneSlotResident|TrainerPassesResidentLog) '
left_out+='|_NOT_BUILT$'
# Threads are the same whatever the numbers' format, and layouts have none; of the ways of a step one of each kind.
# ctest takes no more than nine pairs of parentheses.
if [[ "$preset" == tsan ]]; then
  left_out+='|ExactnessTest.EveryKindOfAlgorithm|^LayoutTest|^SimulatedFaults\.|^Agreement\.|RoomTest.*_bf16|RoomTest.*_8bit'
  left_out+='|RecoveryTest.*_bf16|RecoveryTest.*_8bit|RecoveryTest.*_lion|RecoveryTest.*_nearest'
  left_out+='|/GpuStepTest.*/DaemonResident |/GpuStepTest.*/TrainerResident |/GpuStepTest.*/Direct '
  left_out+='|GpuExactnessTest.*/DaemonSlowUp '
fi
run_ctest "$build" "$results" "$preset" --exclude-regex "$left_out"
# Not what JAX, ranks, GPUs and Python do with the client library, which is not built that way (what a daemon does for GPUs
# is in the C++ tests, and so are plans), nor files of an installation, imports in any order, and models as transformers
# makes them.
without='import_order or known_model or programs_in_python'
# Every message of 40,000 parameters that passes from gRPC's threads to ours is a race to ThreadSanitizer, which takes a
# minute to see that all of them are suppressed.
[[ "$preset" == tsan ]] && without+=' or of_many_parameters_comes_and_goes or each_parameter_may_have_a_group'
run_pytest "$python" "$results" "$preset-pytest" tests/integration \
  --ignore-glob '*/test_jax_*' --ignore-glob '*/test_fsdp2*' --ignore-glob '*/test_replicas.py' --ignore-glob '*/test_ulysses.py' \
  --ignore-glob '*_ranks.py' --ignore-glob '*/test_model*.py' --ignore-glob '*/test_torch_*' \
  --ignore-glob '*/test_run.py' --ignore-glob '*/test_finetune.py' --ignore-glob '*/test_recipes.py' \
  --ignore-glob '*/test_deepspeed*.py' \
  --ignore-glob '*/test_log_steps.py' --ignore-glob '*/test_plan.py' \
  --ignore-glob '*/test_interrupts.py' --ignore-glob '*/test_install_service.py' -k "not ($without)" --durations 10
