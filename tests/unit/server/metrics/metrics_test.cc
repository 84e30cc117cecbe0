#include "server/metrics/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace superoffload::metrics {
namespace {

using ::testing::HasSubstr;

const optimizer::OptimizerId kModel{1001, "model"};

std::string Get(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(colon + 1), &port)) << address;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  ::inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(::write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char part[4096];
  for (ssize_t bytes; (bytes = ::read(fd, part, sizeof(part))) > 0;) answer.append(part, static_cast<size_t>(bytes));
  ::close(fd);
  return answer;
}

bool Has(const std::string& answer, const std::string& line) { return absl::StrContains(answer, line); }

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() {
    const absl::StatusOr<std::string> address = metrics_.Expose("127.0.0.1:0", [this] { return gauges_; });
    EXPECT_TRUE(address.ok()) << address.status();
    address_ = address.value_or("127.0.0.1:1");
    metrics_.OnHost(kModel, "4f2a", {});
  }

  DaemonGauges gauges_;
  Metrics metrics_{{.version = "1.2.3",
                    .kernel_target = "SVE2",
                    .worker_threads = 5,
                    .memory_budget_bytes = 4096,
                    .labels_are_names = false}};
  std::string address_;
};

TEST_F(MetricsTest, TellsWhatIsRunning) {
  gauges_.optimizers = 2;
  gauges_.memory.state_bytes = 48;
  gauges_.elements = 4;
  const std::string answer = Get(address_);
  EXPECT_TRUE(Has(answer, "superoffload_build_info{kernel_target=\"SVE2\",version=\"1.2.3\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_worker_threads 5"));
  EXPECT_TRUE(Has(answer, "superoffload_memory_budget_bytes 4096"));
  EXPECT_TRUE(Has(answer, "superoffload_optimizers 2"));
  EXPECT_TRUE(Has(answer, "superoffload_memory_bytes{use=\"state\"} 48"));
  EXPECT_TRUE(Has(answer, "superoffload_elements 4"));
}

TEST_F(MetricsTest, AHostedOptimizerIsThereAtZeroBeforeItsFirstStep) {
  const std::string answer = Get(address_);
  EXPECT_TRUE(Has(answer, "superoffload_steps_total{optimizer=\"4f2a\",verdict=\"commit\"} 0"));
  EXPECT_TRUE(Has(answer, "superoffload_parameter_bytes_total{optimizer=\"4f2a\"} 0"));
}

TEST_F(MetricsTest, CountsStepsByVerdictAndForgetsThemWithTheOptimizer) {
  engine::StepReport report;
  report.gradient_bytes = 100;
  report.streamed_bytes = 7;
  metrics_.OnStep(kModel, report);
  metrics_.OnStep(kModel, report);
  report.verdict.verdict = decltype(report.verdict.verdict)::kSkipNonFinite;
  report.verdict.consecutive_skips = 1;
  metrics_.OnStep(kModel, report);
  std::string answer = Get(address_);
  EXPECT_TRUE(Has(answer, "superoffload_steps_total{optimizer=\"4f2a\",verdict=\"commit\"} 2"));
  EXPECT_TRUE(Has(answer, "superoffload_steps_total{optimizer=\"4f2a\",verdict=\"skip_non_finite\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_consecutive_skipped_steps{optimizer=\"4f2a\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_gradient_bytes_total{optimizer=\"4f2a\"} 300"));
  EXPECT_TRUE(Has(answer, "superoffload_streamed_bytes_total{optimizer=\"4f2a\"} 21"));
  metrics_.OnDelete(kModel);
  EXPECT_FALSE(Has(Get(address_), "optimizer=\"4f2a\""));
}

TEST_F(MetricsTest, CountsCheckpointsByResultAndKeepsTheLastWrittenOne) {
  metrics_.OnCheckpoint(kModel, {absl::OkStatus(), "/checkpoints/step-7", 7, 1000, absl::Seconds(2)});
  metrics_.OnCheckpoint(kModel, {absl::ResourceExhaustedError("disk"), "/checkpoints/step-8", 8, 10, absl::Seconds(1)});
  const std::string answer = Get(address_);
  const std::string labels = "{optimizer=\"4f2a\"} ";
  EXPECT_TRUE(Has(answer, "superoffload_checkpoints_total{optimizer=\"4f2a\",result=\"written\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_checkpoints_total{optimizer=\"4f2a\",result=\"failed\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_checkpoint_committed_steps" + labels + "7"));
  EXPECT_TRUE(Has(answer, "superoffload_checkpoint_bytes" + labels + "1000"));
}

TEST(MetricsLabelsTest, NamesAndUsersAreShownWhereTheOperatorWantsIt) {
  Metrics metrics(
      {.version = "", .kernel_target = "", .worker_threads = 1, .memory_budget_bytes = 1, .labels_are_names = true});
  const absl::StatusOr<std::string> address = metrics.Expose("127.0.0.1:0", [] { return DaemonGauges{}; });
  ASSERT_TRUE(address.ok()) << address.status();
  metrics.OnHost(kModel, "4f2a", {});
  metrics.OnStep(kModel, {});
  const optimizer::OptimizerId rank{kModel.uid, "run.1-of-2"};
  metrics.OnHost(rank, "77aa", {.run = "run", .rank = 1, .ranks = 2});
  metrics.OnStep(rank, {});
  const std::string answer = Get(*address);
  EXPECT_TRUE(Has(answer, "superoffload_gradient_norm{optimizer=\"model\",uid=\"1001\"}"));
  EXPECT_TRUE(Has(answer, "superoffload_gradient_norm{optimizer=\"run.1-of-2\",rank=\"1\",run=\"run\",uid=\"1001\"}"));
}

TEST_F(MetricsTest, RanksOfARunAreFoundTogetherWithoutItsName) {
  Metrics other({});  // another daemon's
  const absl::StatusOr<std::string> address = other.Expose("127.0.0.1:0", [] { return DaemonGauges{}; });
  ASSERT_TRUE(address.ok()) << address.status();
  const auto train = [](Metrics& metrics, uint32_t rank) {
    const optimizer::OptimizerId id{kModel.uid, absl::StrCat("secret.", rank, "-of-2")};
    metrics.OnHost(id, absl::StrCat("id", rank), {.run = "secret", .rank = rank, .ranks = 2});
    metrics.OnStep(id, {});
  };
  train(metrics_, 0);
  train(other, 1);
  const std::string here = Get(address_), there = Get(*address);
  EXPECT_FALSE(Has(here, "secret"));
  const std::string label = here.substr(here.find(",run=\""), 24);
  EXPECT_TRUE(Has(here, "{optimizer=\"id0\",rank=\"0\"" + label)) << label;
  EXPECT_TRUE(Has(there, "{optimizer=\"id1\",rank=\"1\"" + label)) << label;
}

TEST_F(MetricsTest, AnAgreementCountsAStepAndNoDurations) {
  metrics_.OnStep(kModel, {.verdict = {.verdict = engine::Verdict::kClip, .global_norm = 3}, .by_agreement = true});
  const std::string answer = Get(address_);
  EXPECT_TRUE(Has(answer, "superoffload_steps_total{optimizer=\"4f2a\",verdict=\"clip\"} 1"));
  EXPECT_TRUE(Has(answer, "superoffload_step_phase_seconds_count{optimizer=\"4f2a\",phase=\"exposed\"} 0"));
}

TEST_F(MetricsTest, PassesAreCountedForTheWholeDaemon) {
  metrics_.OnPass(kModel, {engine::PassKind::kNorm, 1 << 20, absl::Milliseconds(500)});
  const std::string pass = engine::PassName(engine::PassKind::kNorm);
  const std::string answer = Get(address_);
  EXPECT_TRUE(Has(answer, "superoffload_kernel_bytes_total{pass=\"" + pass + "\"} 1048576"));
  EXPECT_TRUE(Has(answer, "superoffload_kernel_seconds_total{pass=\"" + pass + "\"} 0.5"));
}

TEST_F(MetricsTest, AnAddressThatIsTakenIsUnavailable) {
  Metrics other({});
  const absl::Status status = other.Expose(address_, [] { return DaemonGauges{}; }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("metrics_address"));
}

}  // namespace
}  // namespace superoffload::metrics
