include(${PROJECT_SOURCE_DIR}/tests/fault/mutant.cmake)

# Builds the exploration with a rule of the protocol removed from `source`, and a test that finds it: `from` becomes `to`,
# and so do further pairs. `option` breaks a rule of trainers beside it, or is empty.
function(remove_rule name source option from to)
  write_mutant(mutant broken/${name} ${source} "the broken rule ${name}"
    "${ARGV3}" "${ARGV4}" "${ARGV5}" "${ARGV6}" "${ARGV7}" "${ARGV8}")
  set(agreement ${PROJECT_SOURCE_DIR}/client/src/agreement.cc)
  if(source STREQUAL client/src/agreement.cc)
    set(agreement)
  endif()
  add_executable(agreement_without_${name} ${mutant} ${agreement})
  target_link_libraries(agreement_without_${name} PRIVATE agreement_exploration)
  target_compile_options(agreement_without_${name} PRIVATE -Wno-unused)  # of what the bug does not call
  add_test(NAME Agreement.FindsBrokenRule.${name} COMMAND agreement_without_${name} --planted ${option})
endfunction()

foreach(rule IN ITEMS reports generations slots)
  add_test(NAME Agreement.FindsBrokenRule.${rule} COMMAND explore_agreement --without=${rule})
endforeach()

set(engine server/engine)
remove_rule(prepared_before_the_sum ${engine}/step_run.cc ""
  "  record_.Prepare(Values(open_->gradient_scale), {open_->absent, LoggedBuckets()}, open_->max_grad_norm);\n  open_->prepared = true;\n"
  "  if (sink_ != nullptr) sink_->Prepared(statistics_.step, record_.attempt(), SumOfSquares());
  record_.Prepare(Values(open_->gradient_scale), {open_->absent, LoggedBuckets()}, open_->max_grad_norm);\n  open_->prepared = true;\n"
  "  open_->prepared = true;\n  if (sink_ != nullptr) sink_->Prepared(statistics_.step, record_.attempt(), SumOfSquares());\n"
  "  open_->prepared = true;\n")
remove_rule(prepared_outlives_detach ${engine}/step_machine.cc ""
  "    open_->parked = true;\n" "    record_.DropPrepared();\n    open_->parked = true;\n")
remove_rule(prepared_outlives_daemons ${engine}/maintenance.cc ""
  "  std::vector<Stage> stages;\n  if (record_.complete()" "  record_.DropPrepared();\n  std::vector<Stage> stages;\n  if (record_.complete()")
remove_rule(no_other_attempt ${engine}/step_machine.cc ""
  "CheckNotPrepared(\"ABANDON_STEP\"); !status.ok()) return status;" "absl::OkStatus(); !status.ok()) return status;
  if (record_.prepared()) record_.DropPrepared();")
remove_rule(report_of_a_closed_step ${engine}/step_run.cc --without=detach
  "CheckNoStepOpen(\"a report\")" "absl::OkStatus()")
remove_rule(attempt_of_the_end ${engine}/step_run.cc ""
  "total.attempt != record_.attempt()" "total.attempt > record_.attempt()")
remove_rule(roll_forward client/src/agreement.cc ""
  "decision->action == 1) decision->commit" "decision->action == 3) decision->commit"
  "own.prepared_step == first.committed_steps ? 1 : 2" "2")
remove_rule(lineage client/src/agreement.cc ""
  "reports[r].lineage != reports[0].lineage" "false")
