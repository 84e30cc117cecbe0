#include "superoffload/v1/printable.h"

#include <gtest/gtest.h>

namespace superoffload {
namespace {

TEST(PrintableTest, NothingForgesALineOrReachesATerminalAsACommand) {
  EXPECT_EQ(Printable("a\nb\r\t"), "a\\x0ab\\x0d\\x09");
  EXPECT_EQ(Printable("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(Printable("\x7f"), "\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "\\x9b"
            "31m")
      << "the one-character CSI";
}

TEST(PrintableTest, OtherTextStaysAsItIs) {
  EXPECT_EQ(Printable("/ckpt/größe ─ 漢字 £"), "/ckpt/größe ─ 漢字 £");
  EXPECT_EQ(Printable("\xc2"), "\xc2");
}

}  // namespace
}  // namespace superoffload
