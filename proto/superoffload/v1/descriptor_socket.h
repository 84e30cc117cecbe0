/* The descriptor socket: how memfds reach a trainer, because gRPC cannot carry descriptors. Version 7 of the wire.
 *
 * A SOCK_SEQPACKET unix socket, one fixed-size request and one fixed-size reply per exchange. The daemon
 * identifies the peer by SO_PEERCRED when it accepts. The connection stays open for as long as the trainer
 * lives: its end, for whatever reason, ends every attachment made with its token.
 *
 *   HELLO                    -> WELCOME, with the token that gRPC calls present as metadata
 *                               "superoffload-token" (64 lower-case hexadecimal characters)
 *   DESCRIPTORS(epoch)       -> DESCRIPTORS, with the descriptors of the attachment in the order of
 *                               enum superoffload_descriptor in an SCM_RIGHTS control message
 *   DEVICE_MEMORY(epoch)     -> DEVICE_MEMORY, once the daemon can copy from and to the trainer's GPU memory; the one
 *                               request that is larger, superoffload_device_request
 *   LENT_MEMORY(epoch, number) -> LENT_MEMORY, with the descriptor of memory that LendMemory has lent
 *   anything else            -> ERROR, with a canonical status code and a sentence; the connection goes on,
 *                               except after a request of the wrong size, magic or version, which closes it
 *
 * One number versions everything that client and daemon say to each other: this socket, the rings, and the messages of
 * optimizer.proto. Every conversation begins with HELLO, so client and daemon of different numbers part there, with a
 * sentence that names both; a release says which number it speaks (ServerInfo.wire_version).
 *
 * Valid C11 and C++20.
 */
#ifndef SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_
#define SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_

#include "superoffload/v1/step_ring.h"

#define SUPEROFFLOAD_SOCKET_MAGIC 0x46464f53u /* "SOFF" */
#define SUPEROFFLOAD_WIRE_VERSION 7u
#define SUPEROFFLOAD_TOKEN_CHARACTERS 64u
#define SUPEROFFLOAD_TOKEN_METADATA_KEY "superoffload-token"
#define SUPEROFFLOAD_MAX_MESSAGE_BYTES 262144u /* of a gRPC message to the daemon; longer requests come in pages */

enum superoffload_socket_kind {
  SUPEROFFLOAD_SOCKET_HELLO = 1,
  SUPEROFFLOAD_SOCKET_WELCOME = 2,
  SUPEROFFLOAD_SOCKET_DESCRIPTORS = 3,
  SUPEROFFLOAD_SOCKET_ERROR = 4,
  SUPEROFFLOAD_SOCKET_DEVICE_MEMORY = 5,
  SUPEROFFLOAD_SOCKET_LENT_MEMORY = 6
};

enum superoffload_descriptor {
  SUPEROFFLOAD_DESCRIPTOR_RING = 0,       /* read-write: header and rings of step_ring.h */
  SUPEROFFLOAD_DESCRIPTOR_PARAMETERS = 1, /* read-write: published parameters */
  SUPEROFFLOAD_DESCRIPTOR_GRADIENTS = 2,  /* read-write: all gradient slots */
  SUPEROFFLOAD_DESCRIPTOR_STATE = 3,      /* read-only: master weights and moments */
  SUPEROFFLOAD_DESCRIPTOR_COUNT = 4
};

typedef struct superoffload_socket_request {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint64_t attachment_epoch; /* not of HELLO */
  uint64_t lent_number;      /* LENT_MEMORY only */
  uint8_t reserved[40];
} superoffload_socket_request;

typedef struct superoffload_socket_reply {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint32_t code; /* canonical status code; 0 is OK */
  uint32_t descriptors;
  uint64_t bytes[SUPEROFFLOAD_DESCRIPTOR_COUNT]; /* size of each mapping */
  char token[SUPEROFFLOAD_TOKEN_CHARACTERS];     /* WELCOME only */
  char message[384];                             /* ERROR only; NUL-ended */
  uint8_t reserved[16];
} superoffload_socket_reply;

#define SUPEROFFLOAD_MAX_DEVICE_SLOTS 16u
#define SUPEROFFLOAD_MAX_DEVICE_PIECES 128u /* one SCM_RIGHTS message carries at most 253 descriptors */

/* GPU memory that the trainer allocated, in pieces of `piece_bytes`, of which the last may be shorter. A descriptor of
 * each (of the virtual memory API) comes in SCM_RIGHTS, in the order of their addresses. One behind the other they
 * hold, at these byte offsets, device slots, each of which holds the gradient of one bucket in the bucket's gradient
 * dtype; and per slot one double per chunk of 65536 elements, its sum of squares. Each gradient says where in it the
 * bucket's parameters lie (superoffload_gradient_payload). */
typedef struct superoffload_device_request {
  superoffload_socket_request header;
  uint8_t device_uuid[16];
  uint32_t slots; /* 1 to SUPEROFFLOAD_MAX_DEVICE_SLOTS */
  uint32_t reserved;
  uint64_t memory_bytes;
  uint64_t piece_bytes; /* memory_bytes / piece_bytes, rounded up: at most SUPEROFFLOAD_MAX_DEVICE_PIECES */
  uint64_t slots_offset;
  uint64_t slot_bytes;
  uint64_t sums_offset;
  uint64_t sums_bytes; /* per slot */
} superoffload_device_request;

SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_device_request) == 136, "device request is 136 bytes");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_socket_request) == 64, "request is 64 bytes");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_socket_reply) == 512, "reply is 512 bytes");

#endif /* SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_ */
