// JSON objects that end with the CRC-32 of their own text, as the indexes of checkpoints do since there are checksums
// of them:
//
//   {
//    ...,                      the sum is of all bytes up to the comma, which is not among them
//    "text_crc32": "0123abcd"
//   }
//
// So a byte that a disk or an editor has changed is found, whether or not the text still makes sense.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SUMMED_JSON_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SUMMED_JSON_H_

#include <string>
#include <string_view>

namespace superoffload::checkpoint {

inline constexpr char kSumKey[] = "text_crc32";

// `text` is an object with at least one member, and ends with "\n}".
std::string SumUp(std::string_view text);

// Whether `text` is what SumUp has returned, to the byte.
bool IsSummedUp(std::string_view text);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SUMMED_JSON_H_
