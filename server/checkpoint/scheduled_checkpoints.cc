#include "server/checkpoint/scheduled_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/partial_directory.h"
#include "server/checkpoint/run_directory.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

struct Scheduled {
  fs::path path;
  uint64_t sequence;
};

// A link leads to what is somebody else's, an archive for example.
bool IsDirectory(const fs::directory_entry& entry) {
  std::error_code error;
  return fs::is_directory(entry.symlink_status(error));
}

// The directories to which `sequence_of` gives a sequence above 0, the oldest first. Copies that somebody has made
// under names of their own are to have none.
std::vector<Scheduled> List(const fs::path& directory, const std::function<uint64_t(const fs::path&)>& sequence_of) {
  std::error_code error;
  std::vector<Scheduled> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (!IsDirectory(entry)) continue;
    if (const uint64_t sequence = sequence_of(entry.path()); sequence > 0) found.push_back({entry.path(), sequence});
  }
  std::sort(found.begin(), found.end(), [](const Scheduled& a, const Scheduled& b) { return a.sequence < b.sequence; });
  return found;
}

uint64_t SequenceAfter(const std::vector<Scheduled>& scheduled) {
  return scheduled.empty() ? 1 : scheduled.back().sequence + 1;
}

void RemoveAllBut(const std::vector<Scheduled>& scheduled, size_t keep, const char* index_file) {
  std::error_code error;
  for (size_t i = 0; keep > 0 && i + keep < scheduled.size(); ++i) {
    fs::remove(scheduled[i].path / index_file, error);  // what is half removed is no checkpoint
    fs::remove_all(scheduled[i].path, error);
  }
}

constexpr absl::string_view kStep = "step-";

std::string NameOf(uint64_t committed_steps) { return absl::StrFormat("%s%08d", kStep, committed_steps); }

std::string RunNameOf(uint64_t committed_steps, uint64_t lineage) {
  return absl::StrFormat("%s-%016x", NameOf(committed_steps), lineage);
}

bool IsDigit(unsigned char c) { return absl::ascii_isdigit(c); }

// Whether a schedule may have given the name: NameOf(committed_steps), and a further number where that was taken.
bool IsNameOf(uint64_t committed_steps, absl::string_view name) {
  if (!absl::ConsumePrefix(&name, NameOf(committed_steps))) return false;
  return name.empty() || (absl::ConsumePrefix(&name, "-") && std::all_of(name.begin(), name.end(), IsDigit));
}

// The steps in a name that begins as NameOf's do.
std::optional<uint64_t> StepsOf(absl::string_view name) {
  uint64_t committed_steps = 0;
  if (!absl::ConsumePrefix(&name, kStep)) return std::nullopt;
  const auto end = std::find_if_not(name.begin(), name.end(), IsDigit);
  if (!absl::SimpleAtoi(name.substr(0, static_cast<size_t>(end - name.begin())), &committed_steps)) return std::nullopt;
  return committed_steps;
}

std::vector<Scheduled> OfOptimizer(const std::string& directory, const optimizer::HostedOptimizer& optimizer) {
  return List(directory, [&optimizer](const fs::path& path) -> uint64_t {
    const absl::StatusOr<Index> index = ReadIndex(path, ReadScope::OfOwn(optimizer));
    const bool own = index.ok() && index->run == optimizer.run() && index->optimizer == optimizer.id().name &&
                     IsNameOf(index->committed_steps, path.filename().string());
    return own ? index->sequence : 0;
  });
}

std::vector<Scheduled> OfRun(const fs::path& directory, const ReadScope& scope,
                             const std::function<bool(const RunIndex&)>& is_own) {
  return List(directory, [&](const fs::path& path) -> uint64_t {
    const absl::StatusOr<RunIndex> index = ReadRunIndex(path, scope);
    const bool own = index.ok() && is_own(*index) &&
                     path.filename() == RunNameOf(index->moment.committed_steps, index->moment.lineage);
    return own ? index->sequence : 0;
  });
}

// Whether a directory of parts is of the run before its checkpoint `sealed`.
bool IsLeft(const fs::path& growing, const RunMoment& sealed, const ReadScope& scope) {
  std::error_code error;
  for (const fs::directory_entry& part : fs::directory_iterator(growing, error)) {
    const absl::StatusOr<Index> index = ReadIndex(part.path(), scope);
    if (!index.ok()) continue;
    return index->run_name == sealed.run_name &&
           (index->lineage != sealed.lineage || index->committed_steps < sealed.committed_steps);
  }
  return false;
}

// Whether a run that has just taken the checkpoint `sealed` may be writing parts in the directory of that name.
bool MayGrow(absl::string_view name, const RunMoment& sealed) {
  const std::optional<uint64_t> committed_steps = StepsOf(name.substr(1));
  return !committed_steps || (*committed_steps > sealed.committed_steps &&
                              absl::StartsWith(name.substr(1), RunNameOf(*committed_steps, sealed.lineage)));
}

}  // namespace

std::string NewScheduled(const std::string& directory, uint64_t committed_steps) {
  const std::string name = absl::StrCat(directory, "/", NameOf(committed_steps));
  std::string free = name;
  std::error_code error;
  for (int i = 2; fs::exists(fs::symlink_status(free, error)); ++i) free = absl::StrCat(name, "-", i);
  return free;
}

uint64_t NextSequence(const std::string& directory, const optimizer::HostedOptimizer& optimizer) {
  return SequenceAfter(OfOptimizer(directory, optimizer));
}

void PruneScheduled(const std::string& directory, const optimizer::HostedOptimizer& optimizer, size_t keep) {
  RemoveLeftPartials(directory, [](absl::string_view name) {
    const std::optional<uint64_t> committed_steps = StepsOf(name);
    return committed_steps && IsNameOf(*committed_steps, name);
  });
  RemoveAllBut(OfOptimizer(directory, optimizer), keep, kIndexFile);
}

std::string ScheduledRun(const std::string& directory, uint64_t committed_steps, uint64_t lineage) {
  return absl::StrCat(directory, "/", RunNameOf(committed_steps, lineage));
}

uint64_t NextRunSequence(const std::string& directory, const std::string& run_name, const ReadScope& scope) {
  return SequenceAfter(
      OfRun(directory, scope, [&run_name](const RunIndex& index) { return index.moment.run_name == run_name; }));
}

void PruneRuns(const std::string& sealed, size_t keep, const ReadScope& scope) {
  const absl::StatusOr<RunIndex> last = ReadRunIndex(sealed, scope);
  if (!last.ok()) return;
  const fs::path directory = fs::path(sealed).parent_path();
  const auto is_own = [&last](const RunIndex& index) {
    return index.moment.run_name == last->moment.run_name && index.run == last->run;
  };
  RemoveAllBut(OfRun(directory, scope, is_own), keep, kRunIndexFile);
  std::error_code error;
  std::vector<fs::path> left, unfinished;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (!absl::StartsWith(name, ".step-") || !absl::EndsWith(name, ".ranks") || !IsDirectory(entry)) continue;
    if (IsLeft(entry.path(), last->moment, scope)) {
      left.push_back(entry.path());
    } else if (!MayGrow(name, last->moment)) {
      unfinished.push_back(entry.path());
    }
  }
  for (const fs::path& path : left) fs::remove_all(path, error);
  for (const fs::path& path : unfinished) {
    RemoveLeftPartials(path, [](absl::string_view) { return true; });
    fs::remove(path, error);  // where nothing else is in it
  }
}

}  // namespace superoffload::checkpoint
