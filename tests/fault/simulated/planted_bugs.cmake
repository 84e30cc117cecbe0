include(${PROJECT_SOURCE_DIR}/tests/fault/mutant.cmake)

# Builds the simulator with a bug planted in one file, and a test that one of `seeds` seeds finds it, with the arguments
# in `simulator_arguments`. `from` becomes `to`, and a second pair likewise.
#
# The mutated object defines every symbol of its file, so that the library's object is not linked.
function(plant_bug name file seeds from to)
  write_mutant(mutant planted/${name} ${file} "the planted bug ${name}"
    "${ARGV3}" "${ARGV4}" "${ARGV5}" "${ARGV6}")
  add_executable(planted_${name} $<TARGET_OBJECTS:fault_simulator_main> ${mutant})
  target_link_libraries(planted_${name} PRIVATE fault_simulation superoffload_test_algorithms)
  target_compile_options(planted_${name} PRIVATE -Wno-unused -g0)  # of what the bug does not call
  target_link_options(planted_${name} PRIVATE -Wl,--strip-debug)   # nobody debugs it, and it links faster
  add_test(NAME SimulatedFaults.FindsPlantedBug.${name} COMMAND planted_${name} --planted --seeds=${seeds} ${simulator_arguments})
endfunction()

plant_bug(recovery_without_undo server/engine/recovery.cc 500
  "Repair(torn); }" "static_cast<void>(torn); }")
plant_bug(recovery_of_one_step_only server/engine/recovery.cc 500
  "while (record_.absorbed(index) < record_.committed())" "if (record_.absorbed(index) < record_.committed())")
plant_bug(directions_kept_before_the_last_stage server/engine/bucket_pass.cc 2000
  "*round().stage + 1 == layout_.algorithm->stages->count" "*round().stage == 0")
plant_bug(directions_made_again_of_written_state server/engine/bucket_pass.cc 8000
  "    record_->KeepDirections(bucket_, arguments_.absorbed_step);\n" "")
plant_bug(rounding_that_depends_on_the_thread server/engine/bucket_pass.cc 500
  "segment.parameter, record_->seed()" "segment.parameter, record_->seed() + worker")
plant_bug(recovery_rounds_with_another_seed server/engine/recovery.cc 500
  "kernels, record_.seed()" "kernels, record_.seed() + 1")
plant_bug(absorbed_as_another_parameter server/engine/absorb.cc 500
  "segment.parameter, seed" "0, seed")
plant_bug(repaired_by_the_algorithm_of_another_format server/engine/recovery.cc 500
  "algorithm = *layout_.FormatOf(*place.bucket).algorithm" "algorithm = *layout_.algorithm")
plant_bug(masters_read_in_the_format_of_others server/engine/bucket_pass.cc 500
  "layout_.FormatOf(bucket_layout_).algorithm->arrays.front().dtype" "layout_.algorithm->arrays.front().dtype")
plant_bug(committed_before_its_values server/engine/record.cc 500
  "  gradient_scale_[t] = values.gradient_scale;"
  "  header_->committed = t;\n  Order();\n  gradient_scale_[t] = values.gradient_scale;")
plant_bug(undo_released_before_absorbed server/engine/record.cc 500
  "  absorbed_[stretch] = t;\n  Order();\n  kernels::EndUndo(slot(worker));"
  "  kernels::EndUndo(slot(worker));\n  Order();\n  absorbed_[stretch] = t;")
plant_bug(one_slot_free_lost server/engine/step_passes.cc 500
  "sink_ != nullptr && t <= last; ++t" "sink_ != nullptr && (index != 0 || statistics_.step % 3 != 0) && t <= last; ++t")
plant_bug(slot_free_at_the_start_of_the_pass server/engine/step_passes.cc 500
  "  bucket.pass->Start(platform_, ArgumentsOf(index));\n"
  "  if (sink_ != nullptr && bucket.phase == Phase::kUpdating && bucket.pending != 0) {
    sink_->SlotFree(statistics_.step, index, SlotOf(bucket.pending));
  }
  bucket.pass->Start(platform_, ArgumentsOf(index));\n")
plant_bug(state_written_under_a_snapshot server/engine/step_passes.cc 500
  "if (!gate_.Holds(index)) return false;" "return false;")
plant_bug(verdict_after_its_parameters server/engine/step_verdict.cc 500
  "  if (sink_ != nullptr) sink_->VerdictReached(report);\n" ""
  "open_->to_finish > 0) return;"
  "open_->to_finish > 0) return;\n  if (sink_ != nullptr) sink_->VerdictReached(*open_->verdict);")
plant_bug(clipped_speculation_stands server/engine/step_verdict.cc 500
  "!skip && applied == open_->speculative.values()" "!skip")
plant_bug(skip_before_its_speculation_has_ended server/engine/step_verdict.cc 500
  "if (IsSkip(report.verdict) && in_flight_ > absorbing_) return;" "")
plant_bug(clipped_speculation_under_way_stands server/engine/step_passes.cc 500
  "} else if (open_->verdict->speculation_stands) {" "} else if (true) {")
plant_bug(restored_before_its_steps server/engine/record.cc 8000
  "  header_->committed = committed;\n"
  "  header_->incomplete = 0;\n  Order();\n  header_->committed = committed;\n")
plant_bug(push_not_recorded server/engine/record.cc 8000
  "  header_->incomplete = static_cast<uint32_t>(Incompleteness::kPushing);\n" "")

plant_bug(prepared_after_its_sum_has_left server/engine/step_run.cc 2000
  "  record_.Prepare(Values"
  "  if (sink_) sink_->Prepared(statistics_.step, record_.attempt(), SumOfSquares());\n  record_.Prepare(Values"
  "  if (sink_ != nullptr) sink_->Prepared(statistics_.step, record_.attempt(), SumOfSquares());\n" "")
plant_bug(parked_step_forgotten server/engine/step_run.cc 500
  "  open_.reset();\n" "  open_.reset();\n  record_.DropPrepared();\n")
plant_bug(agreement_without_its_gradients server/engine/step_run.cc 500
  "    for (uint32_t i = 0; i < buckets_.size(); ++i) SetPending(i, t);\n" "")

set(simulator_arguments --gpu)
plant_bug(due_uploads_lost_across_steps kernels/gpu/upload_order.cc 2000
  "    speculated_.clear();" "    speculated_.clear();\n    due_.clear();")
plant_bug(upload_before_the_verdict kernels/gpu/upload_order.cc 500
  "if (speculative) speculated_.push_back(bucket);" "if (speculative) Add(bucket);")
plant_bug(slot_freed_before_its_copy kernels/gpu/mover.cc 500
  "  if (CudaStatus status = IssueDown(bucket, slot, host_slot, what); !status.ok()) return status;
  return arrivals_->After(down_.get(), std::move(on_arrival));"
  "  if (CudaStatus status = arrivals_->After(down_.get(), std::move(on_arrival)); !status.ok()) return status;
  return IssueDown(bucket, slot, host_slot, what);")
plant_bug(due_upload_not_waited_for kernels/gpu/mover.cc 500
  "if (on_its_way) failure =" "if (on_its_way && false) failure =")
plant_bug(landed_before_its_copy kernels/gpu/mover.cc 500
  "  if (CudaStatus status = IssueUp(upload.bucket); !status.ok()) return status;\n" ""
  "  return landings_->After(up_.get(), [this, upload]"
  "  if (CudaStatus status = IssueUp(upload.bucket); !status.ok()) return status;
  return landings_->After(up_.get(), [this, upload]")
plant_bug(slot_given_back_before_its_copy server/transport/device_mover.cc 500
  "  rings_->GradientTaken(entry.step, entry.payload.gradient.slot);\n" ""
  "  if (!probe) submitted_[entry.index] = true;"
  "  if (!probe) submitted_[entry.index] = true;
  rings_->GradientTaken(entry.step, entry.payload.gradient.slot);")

# Who copies, residents, and parameters without a gradient, each in all combinations that the seeds draw.
plant_bug(direct_sums_before_their_kernel client/src/gpu/gpu_moves.cc 500
  "if (Status status = packer_->WaitPacked(mover_->down_stream()); !status.ok()) return status;"
  "if (Direct(entry.index)) { /* too early */ } else if (Status status = packer_->WaitPacked(mover_->down_stream()); !status.ok()) return status;")
plant_bug(direct_over_parameters_on_their_way client/src/gpu/gpu_moves.cc 500
  "if (Status status = FromCuda(mover_->WaitLanded(bucket, packer_->stream())); !status.ok()) return status;" "")
plant_bug(step_ends_while_the_model_is_read client/src/gpu/gpu_moves.cc 500
  "if (Status status = packer_->AfterAll(); !status.ok()) return status;" "")
plant_bug(resident_gradient_kept_before_it_is_packed client/src/gpu/gpu_moves.cc 500
  "residents_->KeepGradient(bucket, place, packer_->stream())"
  "residents_->KeepGradient(bucket, place, mover_->up_stream())")
plant_bug(resident_updated_by_a_skip client/src/gpu/gpu_moves.cc 500
  "  if (commits) {" "  if (commits || entry.index == SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE) {")
plant_bug(former_resident_not_copied client/src/gpu/gpu_moves.cc 500
  "    mover_->SetCopiesUp(bucket, kind_ != SUPEROFFLOAD_MOVER_DAEMON && !resident(bucket));"
  "    if (kind_ == SUPEROFFLOAD_MOVER_DAEMON || resident(bucket)) mover_->SetCopiesUp(bucket, false);")
plant_bug(resident_copied_by_the_daemon client/src/gpu/gpu_moves.cc 500
  "if (!DaemonCopiesUp(bucket)) flags" "if (!DaemonCopiesUp(bucket) && !resident(bucket)) flags")
plant_bug(resident_read_before_its_update client/src/gpu/resident_buckets.cc 500
  "if (Status status = FromCuda(mover->RecordLanded(index)); !status.ok()) return status;"
  "static_cast<void>(index);")
plant_bug(resident_not_clipped client/src/gpu/resident_steps.cc 500
  "committed_.gradient_scale *= clip_coefficient;" "static_cast<void>(clip_coefficient);")
plant_bug(resident_rounds_as_the_first_elements client/src/gpu/resident_buckets.cc 500
  "{run.rounding.key, nullptr, run.rounding.first}" "{run.rounding.key, nullptr, 0}")
plant_bug(resident_moves_without_a_gradient client/src/gpu/resident_steps.cc 500
  "if (!committed_.absent[part.parameter]) {" "{")
plant_bug(resident_counts_steps_without_a_gradient client/src/gpu/resident_steps.cc 500
  "committed_.absent[i] ? 0 : 1" "1")
plant_bug(resident_counts_from_all_steps client/src/gpu/resident_steps.cc 500
  "if (options.parameter_steps != nullptr) {" "if (false) {")
plant_bug(absent_from_the_step_after client/src/gpu/resident_steps.cc 500
  "      std::fill(open_.absent.begin(), open_.absent.end(), false);\n" "")
plant_bug(resident_from_a_state_not_settled server/engine/maintenance.cc 500
  "Passes(PassKind::kAbsorb, first_bucket)" "Passes(PassKind::kAbsorb, first_bucket + 1)")
plant_bug(absent_counted_by_the_record server/engine/record.cc 500
  "!places.absent.empty() && places.absent[i] ? counted : counted + 3" "counted + 3")
plant_bug(absent_published_with_a_gradient server/engine/step_machine.cc 500
  "if (!open_->absent.empty() && open_->absent[parameter]) return std::nullopt;" "")

# Gradients of several passes.
plant_bug(sum_fetched_before_it_has_landed client/src/gpu/gradient_sums.cc 500
  "  if (Status status = Wait(sums_[bucket].landed, stream_.get()); !status.ok()) return status;\n" "")
plant_bug(added_before_the_sum_is_fetched client/src/gpu/gradient_sums.cc 500
  "  return Wait(fetched_, pack_stream);" "  static_cast<void>(pack_stream);\n  return {};")
plant_bug(pass_submitted_as_a_gradient client/src/gpu/gpu_moves.cc 500
  "if (pass.last || !done.ok()) events_.arrived" "events_.arrived")
plant_bug(pass_forgets_those_before client/src/gpu/gpu_moves.cc 500
  "if (Status status = packer_->Pack(buckets_[bucket], slot, tensors, dtype, to, pass)"
  "if (Status status = packer_->Pack(buckets_[bucket], slot, tensors, dtype, to, {.adds = false, .last = pass.last})")
plant_bug(pass_waits_for_the_slot_that_it_has client/src/gpu/gpu_moves.cc 500
  "return pass.adds ? waits_.Submit(copy)" "return false ? waits_.Submit(copy)")
plant_bug(resident_keeps_what_one_pass_brings client/src/gpu/gpu_moves.cc 500
  "resident(bucket) && pass.last ?" "resident(bucket) && !pass.adds ?")

# Logs of gradients.
plant_bug(log_absorbed_in_reverse server/engine/bucket_pass.cc 500
  "GradientOf(memory_, bucket_layout_, index, t, record_->Logged(t, bucket_))"
  "GradientOf(memory_, bucket_layout_, index, arguments_.earlier.empty() ? t : arguments_.earlier.front().step + arguments_.absorbed_step - t, record_->Logged(t, bucket_))")
plant_bug(log_absorbed_with_the_scalars_of_its_last_step server/engine/bucket_pass.cc 500
  "absorb(begin, earlier.step, earlier.segments)" "absorb(begin, earlier.step, arguments_.segments)")
plant_bug(stretch_absorbed_before_its_gradient server/engine/bucket_pass.cc 500
  "    record_->EndAbsorb(worker, stretch, t);\n" ""
  "    AbsorbRange(layout_, view, index, "
  "    record_->BeginAbsorb(worker, stretch, t);\n    record_->EndAbsorb(worker, stretch, t);\n    AbsorbRange(layout_, view, index, ")
plant_bug(log_absorbed_as_one_step server/engine/bucket_pass.cc 2000
  "    record_->EndAbsorb(worker, stretch, t);\n"
  "    if (t == arguments_.absorbed_step) for (uint64_t step = arguments_.earlier.empty() ? t : arguments_.earlier.front().step; step <= t; ++step) record_->EndAbsorb(worker, stretch, step);\n")
plant_bug(log_cut_off_between_two server/engine/recovery.cc 2000
  "  while (record_.absorbed(index) < record_.committed()) {\n"
  "  const uint64_t last = std::min(record_.committed(), record_.absorbed(index) + 2);\n  while (record_.absorbed(index) < last) {\n")
plant_bug(log_that_overflows server/engine/step_verdict.cc 8000
  "if (!IsSkip(report.verdict) && !LogsHaveRoom()) return;" "")
plant_bug(steps_kept_for_less_than_a_log server/engine/layout.cc 500
  "std::max(layout_.kept_steps, spec_.log_slots)" "std::max(layout_.kept_steps, spec_.log_slots - 1)")
plant_bug(log_read_from_the_slots server/engine/record.cc 500
  "logged_[t % kept_ * buckets_.size() + i] = logged ? 1 : 0;" "logged_[t % kept_ * buckets_.size() + i] = 0;")
plant_bug(parameters_behind_a_log_forgotten server/engine/record.cc 500
  "if (logged) unpublished_[i] = 1;" "")
plant_bug(landed_in_the_log_of_the_next_step client/src/gpu/gpu_moves.cc 500
  "committed_steps % buckets_" "(committed_steps + 1) % buckets_")

# One slot for gradients.
plant_bug(landed_in_a_slot_that_is_not_free client/src/gpu/slot_waits.cc 500
  "if (slots_[bucket] != Slot::kFree) break;" "")
plant_bug(slot_of_a_skipped_step_not_free client/src/gpu/slot_waits.cc 500
  "commits ? Slot::kPending : Slot::kFree" "Slot::kPending")
plant_bug(overtakes_a_gradient_that_waits client/src/gpu/slot_waits.cc 500
  "return any_ ? SubmitBehind({kNoBucket, std::move(go)}) : go();" "return go();")
plant_bug(only_slot_never_absorbed server/engine/step_machine.cc 500
  "if (layout_->buckets[index].one_slot() && !layout_->in_place) due_.insert(index);" "")
plant_bug(only_slot_free_before_it_is_absorbed server/engine/step_passes.cc 500
  "  bucket.absorbing = true;\n"
  "  bucket.absorbing = true;\n  if (sink_ != nullptr && layout_->buckets[index].one_slot()) sink_->SlotFree(statistics_.step, index, 0);\n")
plant_bug(log_slots_that_overlap server/engine/layout.cc 500
  "layout_.gradients_bytes += bucket.log_slot_bytes();" "")

# Parameters in place.
plant_bug(published_before_the_gradient_is_absorbed server/engine/bucket_pass.cc 3000
  "  if (absorbed_step != 0) record_->EndAbsorb(worker, chunk, absorbed_step);\n"
  "  if (arguments_.kind == PassKind::kTakeIn) kernels::Narrow(n, view.state.Floats(0), theta);\n  if (absorbed_step != 0) record_->EndAbsorb(worker, chunk, absorbed_step);\n")
plant_bug(published_over_gradients_before_the_verdict server/engine/step_passes.cc 500
  "open_->speculate && !layout_->in_place &&" "open_->speculate &&")

# Weights that stream.
plant_bug(slot_refilled_before_it_is_read kernels/gpu/weight_stream.cc 500
  "  if (CudaStatus status = WaitForReaders(&slot); !status.ok()) return status;\n" "")
plant_bug(slot_of_another_unit kernels/gpu/weight_stream.cc 500
  "if (SlotOf(index).owner != index) {" "if (!SlotOf(index).owner) {")
plant_bug(fetched_into_a_slot_in_use kernels/gpu/weight_stream.cc 500
  "  if (reading) taken[slot_of_[*reading]] = true;\n" "")
plant_bug(unit_not_waited_for kernels/gpu/weight_stream.cc 500
  "  for (const uint32_t bucket : buckets(index)) {
    if (CudaStatus status = mover_.WaitLanded(bucket, stream); !status.ok()) return status;
  }\n" "")
plant_bug(unit_of_a_slot_not_refreshed kernels/gpu/weight_stream.cc 500
  "mover_.SetCopiesUp(bucket, true);" "{ mover_.SetCopiesUp(bucket, true); static_cast<void>(mover_.Fetch(bucket)); mover_.SetCopiesUp(bucket, false); }")
plant_bug(unit_that_nobody_has_fetched kernels/gpu/weight_stream.cc 500
  "  if (CudaStatus status = Fetch(index); !status.ok()) return status;\n  for" "  for")
plant_bug(unit_that_stays_fetched_when_it_is_read kernels/gpu/weight_stream.cc 500
  "    if (CudaStatus status = Fetch(index); !status.ok()) return status;\n  }\n  return {};" "  }\n  return {};")
plant_bug(units_that_share_a_slot_stay kernels/gpu/weight_stream.cc 500
  "return IsAlone(index);" "return true;")
plant_bug(unit_that_left_still_copied kernels/gpu/weight_stream.cc 500
  "  for (const uint32_t bucket : buckets(*slot->owner)) mover_.SetCopiesUp(bucket, false);\n" "")
plant_bug(step_ends_while_a_unit_is_read kernels/gpu/weight_stream.cc 500
  "    if (!wait_for(stream)) return false;\n" "    static_cast<void>(stream);\n")
plant_bug(published_while_it_may_be_read server/engine/step_passes.cc 500
  "bucket.landing == Landing::kSlot" "bucket.landing != Landing::kLog")
