/* The keeper's socket: what superoffloadd --keeper holds for its daemon, also while no daemon can start.
 *
 * keeper.sock beside control.sock, a SOCK_STREAM unix socket. It answers the keeper's own user and root, as SO_PEERCRED
 * has them, one request per connection. Both are text:
 *
 *   LIST        -> "OK", then a line per entry: its bytes, a space, its name
 *   DROP NAME   -> "OK"; frees the entry
 *
 * or one line: a canonical status code, a space, and a sentence. The entry of an optimizer is optimizer-UID-NAME.
 *
 * Valid C11 and C++20.
 */
#ifndef SUPEROFFLOAD_V1_KEEPER_SOCKET_H_
#define SUPEROFFLOAD_V1_KEEPER_SOCKET_H_

#define SUPEROFFLOAD_KEEPER_SOCKET "keeper.sock"
#define SUPEROFFLOAD_KEEPER_ENTRY_PREFIX "optimizer-"
#define SUPEROFFLOAD_KEEPER_REQUEST_BYTES 512u

#endif /* SUPEROFFLOAD_V1_KEEPER_SOCKET_H_ */
