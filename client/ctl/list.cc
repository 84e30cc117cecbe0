#include "client/ctl/list.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/ctl/json.h"
#include "client/ctl/optimizer_text.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

// Ranks of a run stand together.
auto Order(const HostedAt& hosted) {
  const v1::RunMember& member = hosted.optimizer.member();
  return std::tuple(member.run(), member.rank(), hosted.endpoint, hosted.optimizer.uid(), hosted.optimizer.name());
}

absl::Status ListAt(const std::string& endpoint, std::vector<HostedAt>* all) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(endpoint);
  if (!client.ok()) return client.status();
  absl::StatusOr<std::vector<v1::Optimizer>> optimizers = (*client)->ListOptimizers();
  if (!optimizers.ok()) return optimizers.status();
  for (v1::Optimizer& optimizer : *optimizers) all->push_back({endpoint, std::move(optimizer)});
  return absl::OkStatus();
}

}  // namespace

absl::Status List(Client& client, const Arguments& arguments) {
  absl::StatusOr<std::vector<v1::Optimizer>> optimizers = client.ListOptimizers();
  if (!optimizers.ok()) return optimizers.status();
  v1::ListOptimizersResponse response;
  response.mutable_optimizers()->Assign(optimizers->begin(), optimizers->end());
  std::fputs((arguments.json ? JsonText(response) : ListText(response)).c_str(), stdout);
  return absl::OkStatus();
}

absl::Status ListAll(const std::string& endpoints, bool json) {
  const std::vector<std::string> named = absl::StrSplit(endpoints, ',', absl::SkipEmpty());
  const std::vector<std::string> places = named.empty() ? MachineEndpoints() : named;
  if (places.empty()) {
    return absl::UnavailableError("no superoffloadd listens on this machine; name endpoints with --endpoint=A,B");
  }
  std::vector<HostedAt> all;
  absl::Status last;
  size_t answered = 0;
  for (const std::string& endpoint : places) {
    if (absl::Status status = ListAt(endpoint, &all); status.ok()) {
      ++answered;
    } else {
      std::fprintf(stderr, "superoffloadctl: %s: %s\n", endpoint.c_str(), Printable(std::string(status.message())).c_str());
      last = status;
    }
  }
  std::sort(all.begin(), all.end(), [](const HostedAt& a, const HostedAt& b) { return Order(a) < Order(b); });
  if (json) {
    for (const HostedAt& hosted : all) std::fputs(JsonLine(hosted.optimizer).c_str(), stdout);
  } else {
    std::fputs(ListAllText(all).c_str(), stdout);
  }
  return answered == 0 ? last : absl::OkStatus();
}

}  // namespace superoffload::ctl
