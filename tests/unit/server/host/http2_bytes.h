// Bytes of HTTP/2 as a client sends them.
#ifndef SUPEROFFLOAD_TESTS_UNIT_SERVER_HOST_HTTP2_BYTES_H_
#define SUPEROFFLOAD_TESTS_UNIT_SERVER_HOST_HTTP2_BYTES_H_

#include <cstdint>
#include <string>

namespace superoffload::host {

inline const std::string kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

inline std::string Http2Bytes(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload = "") {
  std::string bytes;
  for (int shift : {16, 8, 0}) bytes += static_cast<char>(payload.size() >> shift & 0xff);
  bytes += static_cast<char>(type);
  bytes += static_cast<char>(flags);
  for (int shift : {24, 16, 8, 0}) bytes += static_cast<char>(stream >> shift & 0xff);
  return bytes + payload;
}

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_TESTS_UNIT_SERVER_HOST_HTTP2_BYTES_H_
