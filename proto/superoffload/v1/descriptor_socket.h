/* The descriptor socket, version 1: how memfds reach a trainer, because gRPC cannot carry descriptors.
 *
 * A SOCK_SEQPACKET unix socket, one fixed-size request and one fixed-size reply per exchange. The daemon
 * identifies the peer by SO_PEERCRED when it accepts. The connection stays open for as long as the trainer
 * lives: its end, for whatever reason, ends every attachment made with its token.
 *
 *   HELLO                    -> WELCOME, with the token that gRPC calls present as metadata
 *                               "superoffload-token" (64 lower-case hexadecimal characters)
 *   DESCRIPTORS(epoch)       -> DESCRIPTORS, with the descriptors of the attachment in the order of
 *                               enum superoffload_descriptor in an SCM_RIGHTS control message
 *   anything else            -> ERROR, with a canonical status code and a sentence; the connection goes on,
 *                               except after a request of the wrong size, magic or version, which closes it
 *
 * Valid C11 and C++20.
 */
#ifndef SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_
#define SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_

#include "superoffload/v1/step_ring.h"

#define SUPEROFFLOAD_SOCKET_MAGIC 0x46464f53u /* "SOFF" */
#define SUPEROFFLOAD_SOCKET_VERSION 1u
#define SUPEROFFLOAD_TOKEN_CHARACTERS 64u
#define SUPEROFFLOAD_TOKEN_METADATA_KEY "superoffload-token"

enum superoffload_socket_kind {
  SUPEROFFLOAD_SOCKET_HELLO = 1,
  SUPEROFFLOAD_SOCKET_WELCOME = 2,
  SUPEROFFLOAD_SOCKET_DESCRIPTORS = 3,
  SUPEROFFLOAD_SOCKET_ERROR = 4
};

enum superoffload_descriptor {
  SUPEROFFLOAD_DESCRIPTOR_RING = 0,       /* read-write: header and rings of step_ring.h */
  SUPEROFFLOAD_DESCRIPTOR_PARAMETERS = 1, /* read-write: published parameters */
  SUPEROFFLOAD_DESCRIPTOR_GRADIENTS = 2,  /* read-write: both gradient slots */
  SUPEROFFLOAD_DESCRIPTOR_STATE = 3,      /* read-only: master weights and moments */
  SUPEROFFLOAD_DESCRIPTOR_COUNT = 4
};

typedef struct superoffload_socket_request {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint64_t attachment_epoch; /* DESCRIPTORS only */
  uint8_t reserved[48];
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

SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_socket_request) == 64, "request is 64 bytes");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_socket_reply) == 512, "reply is 512 bytes");

#endif /* SUPEROFFLOAD_V1_DESCRIPTOR_SOCKET_H_ */
