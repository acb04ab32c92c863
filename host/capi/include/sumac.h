/* SPDX-License-Identifier: MIT OR Apache-2.0
 * Generated from the sources of sumac-capi by its tests. Do not edit.
 */

#ifndef SUMAC_H
#define SUMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The color of sumac_comm_split() for ranks that get no communicator.
 */
#define SUMAC_NO_COLOR -1

/**
 * What a function returns: SUMAC_OK, or a code for each error. The codes keep their numbers in all versions; later
 * versions add some, so treat an unknown one as an error.
 *
 * Codes below 100 are of calls on a communicator, from 100 of joining, from 200 of making communicators from others,
 * and from 300 of this interface. sumac_status_is_rejection() tells which ones had no effect.
 */
enum sumac_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * No error.
     */
    SUMAC_OK = 0,
    /**
     * Ranks called different operations. All ranks get this error; sumac_last_error_call() has both calls.
     */
    SUMAC_ERROR_MISMATCH = 1,
    /**
     * The peer of a message is lost, or any rank of a communicator that does not recover.
     */
    SUMAC_ERROR_RANK_LOST = 2,
    /**
     * Ranks failed. All survivors get this error; sumac_last_error_ranks() lists them. Go on with sumac_comm_shrink().
     */
    SUMAC_ERROR_RANKS_FAILED = 3,
    /**
     * This rank reaches too few ranks to go on without a controller.
     */
    SUMAC_ERROR_PARTITIONED = 4,
    /**
     * It cannot be determined whether the operation completed on other ranks.
     */
    SUMAC_ERROR_OUTCOME_UNKNOWN = 5,
    /**
     * A device on the path to the root of the tree stopped answering.
     */
    SUMAC_ERROR_PATH_LOST = 6,
    /**
     * A device of the tree no longer knows the job's group.
     */
    SUMAC_ERROR_GROUP_LOST = 7,
    /**
     * The leaf device is gone.
     */
    SUMAC_ERROR_DEVICE_LOST = 8,
    /**
     * The leaf device rejected a contribution or violated the protocol.
     */
    SUMAC_ERROR_DEVICE = 9,
    /**
     * Memory could not be registered. A rejection: nothing else has changed.
     */
    SUMAC_ERROR_MEMORY = 10,
    /**
     * Ranks were late for an operation; sumac_last_error_ranks() lists them.
     */
    SUMAC_ERROR_STRAGGLERS = 11,
    /**
     * This rank was late, and the others go on without it.
     */
    SUMAC_ERROR_EXCLUDED = 12,
    /**
     * The deadline passed.
     */
    SUMAC_ERROR_DEADLINE = 13,
    /**
     * Too many operations are in flight. A rejection.
     */
    SUMAC_ERROR_TOO_MANY_IN_FLIGHT = 14,
    /**
     * The requested algorithm is not possible. A rejection.
     */
    SUMAC_ERROR_NOT_POSSIBLE = 15,
    /**
     * A device does not support the operation.
     */
    SUMAC_ERROR_UNSUPPORTED = 16,
    /**
     * An argument is invalid: NULL, a wrong length, an unknown number. A rejection.
     */
    SUMAC_ERROR_ARGUMENT = 17,
    /**
     * A host collective or a message failed for another reason.
     */
    SUMAC_ERROR_SCHEDULE = 18,
    /**
     * This process was forked from the one that joined. Join a job from this process.
     */
    SUMAC_ERROR_FORKED = 19,
    /**
     * sumac_comm_abort() ended the communicator.
     */
    SUMAC_ERROR_CANCELLED = 20,
    /**
     * An earlier error ended the communicator; sumac_last_error_cause() is that error.
     */
    SUMAC_ERROR_ENDED = 21,
    /**
     * This rank has left the communicator, before it started a prepared operation for example.
     */
    SUMAC_ERROR_LEFT = 22,
    /**
     * An environment variable is missing or invalid.
     */
    SUMAC_ERROR_ENVIRONMENT = 100,
    /**
     * The configuration file that SUMAC_CONFIG names is invalid.
     */
    SUMAC_ERROR_CONFIG_FILE = 101,
    /**
     * This host has no address to bind to.
     */
    SUMAC_ERROR_ADDRESS = 102,
    /**
     * The controller cannot be reached, or refused the rank.
     */
    SUMAC_ERROR_CONTROLLER = 103,
    /**
     * Rank 0 cannot run the job's controller.
     */
    SUMAC_ERROR_EMBEDDED_CONTROLLER = 104,
    /**
     * The data port could not be opened.
     */
    SUMAC_ERROR_PORT = 105,
    /**
     * The port for connections between ranks could not be opened.
     */
    SUMAC_ERROR_LISTEN = 106,
    /**
     * The connections between ranks failed.
     */
    SUMAC_ERROR_MESH = 107,
    /**
     * Attaching to the leaf device failed.
     */
    SUMAC_ERROR_ATTACH = 108,
    /**
     * The controller's reply is invalid.
     */
    SUMAC_ERROR_MEMBERSHIP = 109,
    /**
     * A setting of sumac_config_set() is unknown or has an invalid value. A rejection.
     */
    SUMAC_ERROR_SETTING = 110,
    /**
     * The thread that drives started operations could not be started.
     */
    SUMAC_ERROR_PROGRESS_THREAD = 111,
    /**
     * This rank is no longer a member, so it cannot shrink the communicator.
     */
    SUMAC_ERROR_NOT_MEMBER = 200,
    /**
     * The controller does not report the survivors.
     */
    SUMAC_ERROR_SURVIVORS = 201,
    /**
     * A bug: the library panicked. The communicator has ended.
     */
    SUMAC_ERROR_PANIC = 300,
    /**
     * This rank has left, but other ranks may still have needed it.
     */
    SUMAC_ERROR_UNCONFIRMED = 301,
    /**
     * Nothing completed within the time limit of sumac_wait_any(). Everything goes on.
     */
    SUMAC_ERROR_TIMEOUT = 302,
    /**
     * The system refused a resource, such as a file descriptor. A rejection.
     */
    SUMAC_ERROR_SYSTEM = 303,
    /**
     * An error that this version of the interface has no code for.
     */
    SUMAC_ERROR_OTHER = 399,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_status sumac_status;
#else
typedef int32_t sumac_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What the output of a failed call holds.
 */
enum sumac_output_state
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The error does not tell. If it is no rejection, the output is a mixture of old and new chunks, or unspecified
     * after a host collective.
     */
    SUMAC_OUTPUT_UNKNOWN = 0,
    /**
     * Some elements hold results, and all others are unchanged.
     */
    SUMAC_OUTPUT_ELEMENTS = 1,
    /**
     * The contents are unspecified.
     */
    SUMAC_OUTPUT_UNSPECIFIED = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_output_state sumac_output_state;
#else
typedef int32_t sumac_output_state;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A collective.
 */
enum sumac_collective
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * All ranks contribute, all ranks receive the reduction.
     */
    SUMAC_ALL_REDUCE = 1,
    /**
     * All ranks contribute, the root receives the reduction.
     */
    SUMAC_REDUCE = 2,
    /**
     * The root contributes, all ranks receive.
     */
    SUMAC_BROADCAST = 3,
    /**
     * All ranks contribute, each rank receives its block of the reduction.
     */
    SUMAC_REDUCE_SCATTER = 4,
    /**
     * Each rank contributes its block, all ranks receive every block.
     */
    SUMAC_ALL_GATHER = 5,
    /**
     * No data; every rank waits for all ranks.
     */
    SUMAC_BARRIER = 6,
    /**
     * Each rank contributes its block, the root receives every block. Host collectives only.
     */
    SUMAC_GATHER = 7,
    /**
     * The root contributes, each rank receives its block. Host collectives only.
     */
    SUMAC_SCATTER = 8,
    /**
     * Every rank sends one block to every rank. Host collectives only.
     */
    SUMAC_ALL_TO_ALL = 9,
    /**
     * All-to-all with blocks of different lengths. Host collectives only.
     */
    SUMAC_ALL_TO_ALL_V = 10,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_collective sumac_collective;
#else
typedef int32_t sumac_collective;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * An element type. All are little-endian.
 */
enum sumac_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * 8-bit signed integer; sums and products wrap.
     */
    SUMAC_I8 = 1,
    /**
     * 8-bit unsigned integer; sums and products wrap.
     */
    SUMAC_U8 = 2,
    /**
     * 16-bit signed integer; sums and products wrap.
     */
    SUMAC_I16 = 3,
    /**
     * 16-bit unsigned integer; sums and products wrap.
     */
    SUMAC_U16 = 4,
    /**
     * 32-bit signed integer; sums and products wrap.
     */
    SUMAC_I32 = 5,
    /**
     * 32-bit unsigned integer; sums and products wrap.
     */
    SUMAC_U32 = 6,
    /**
     * 64-bit signed integer; sums and products wrap.
     */
    SUMAC_I64 = 7,
    /**
     * 64-bit unsigned integer; sums and products wrap.
     */
    SUMAC_U64 = 8,
    /**
     * IEEE 754 binary16; accumulated in SUMAC_F32.
     */
    SUMAC_F16 = 9,
    /**
     * bfloat16; accumulated in SUMAC_F32.
     */
    SUMAC_BF16 = 10,
    /**
     * IEEE 754 binary32.
     */
    SUMAC_F32 = 11,
    /**
     * IEEE 754 binary64.
     */
    SUMAC_F64 = 12,
    /**
     * OCP 8-bit float E4M3 (without infinities; other libraries call it "e4m3fn"); accumulated in SUMAC_F32.
     */
    SUMAC_F8_E4M3 = 13,
    /**
     * OCP 8-bit float E5M2; accumulated in SUMAC_F32.
     */
    SUMAC_F8_E5M2 = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_dtype sumac_dtype;
#else
typedef int32_t sumac_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A reduction operator.
 */
enum sumac_op
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Sum. Integers wrap; floats are rounded to the accumulator type after each addition.
     */
    SUMAC_SUM = 1,
    /**
     * Product. Integers wrap; floats are rounded to the accumulator type after each multiplication.
     */
    SUMAC_PROD = 2,
    /**
     * IEEE 754-2019 `minimum`: NaN propagates, and -0 < +0.
     */
    SUMAC_MIN = 3,
    /**
     * IEEE 754-2019 `maximum`: NaN propagates, and -0 < +0.
     */
    SUMAC_MAX = 4,
    /**
     * Average: the sum, divided once by the number of ranks, before the result is rounded.
     */
    SUMAC_AVG = 5,
    /**
     * Sum of the contributions, each multiplied by a scalar of its rank before it is sent.
     */
    SUMAC_PREMUL_SUM = 6,
    /**
     * Bitwise and of integers.
     */
    SUMAC_BAND = 7,
    /**
     * Bitwise or of integers.
     */
    SUMAC_BOR = 8,
    /**
     * Bitwise exclusive or of integers.
     */
    SUMAC_BXOR = 9,
    /**
     * Logical and of integers: 1 if no value is 0, else 0.
     */
    SUMAC_LAND = 10,
    /**
     * Logical or of integers: 1 if any value is not 0, else 0.
     */
    SUMAC_LOR = 11,
    /**
     * Logical exclusive or of integers: 1 if an odd number of values is not 0, else 0.
     */
    SUMAC_LXOR = 12,
    /**
     * The pair {value, index} with the smallest value: NaN propagates, and ties go to the lowest index.
     */
    SUMAC_MIN_LOC = 13,
    /**
     * The pair {value, index} with the largest value: NaN propagates, and ties go to the lowest index.
     */
    SUMAC_MAX_LOC = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_op sumac_op;
#else
typedef int32_t sumac_op;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The paths of operations.
 */
enum sumac_path
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * No path: the requested one is not possible.
     */
    SUMAC_PATH_NONE = 0,
    /**
     * The aggregation tree.
     */
    SUMAC_PATH_TREE = 1,
    /**
     * Ring.
     */
    SUMAC_PATH_RING = 2,
    /**
     * Recursive halving and doubling.
     */
    SUMAC_PATH_HALVING_DOUBLING = 3,
    /**
     * Dissemination.
     */
    SUMAC_PATH_DISSEMINATION = 4,
    /**
     * No communication: a communicator of one rank.
     */
    SUMAC_PATH_LOCAL = 5,
    /**
     * Recursive doubling.
     */
    SUMAC_PATH_RECURSIVE_DOUBLING = 6,
    /**
     * Binomial tree.
     */
    SUMAC_PATH_BINOMIAL = 7,
    /**
     * Bruck's algorithm.
     */
    SUMAC_PATH_BRUCK = 8,
    /**
     * Pairwise exchange.
     */
    SUMAC_PATH_PAIRWISE = 9,
    /**
     * The aggregation tree's expression, evaluated by ranks.
     */
    SUMAC_PATH_HOST_TREE = 10,
    /**
     * From one rank to another.
     */
    SUMAC_PATH_POINT_TO_POINT = 11,
    /**
     * NCCL, on GPU memory.
     */
    SUMAC_PATH_NCCL = 12,
    /**
     * One-shot exchange.
     */
    SUMAC_PATH_ONE_SHOT = 13,
    /**
     * A star.
     */
    SUMAC_PATH_STAR = 20,
    /**
     * Full mesh.
     */
    SUMAC_PATH_FULL_MESH = 21,
    /**
     * Double binary tree.
     */
    SUMAC_PATH_DOUBLE_TREE = 22,
    /**
     * Nonuniform hierarchical ring.
     */
    SUMAC_PATH_NHR = 23,
    /**
     * Parallel aggregated trees.
     */
    SUMAC_PATH_PAT = 24,
    /**
     * Swing, in its bandwidth form.
     */
    SUMAC_PATH_SWING = 25,
    /**
     * Swing, in its latency form.
     */
    SUMAC_PATH_SWING_LATENCY = 26,
    /**
     * Bine trees and butterflies.
     */
    SUMAC_PATH_BINE = 27,
    /**
     * Van de Geijn's broadcast.
     */
    SUMAC_PATH_VAN_DE_GEIJN = 28,
    /**
     * Rings along the dimensions of a grid, one after the other.
     */
    SUMAC_PATH_RING_2D = 29,
    /**
     * Rings along all dimensions of a torus at once.
     */
    SUMAC_PATH_TORUS_2D = 30,
    /**
     * Exchanges between neighbours of a mesh.
     */
    SUMAC_PATH_MESH_2D = 31,
    /**
     * Full meshes inside servers, and rings between them.
     */
    SUMAC_PATH_HIERARCHICAL_RING = 32,
    /**
     * Pipelined chain.
     */
    SUMAC_PATH_CHAIN = 33,
    /**
     * Full meshes inside servers, and pairwise exchange between them.
     */
    SUMAC_PATH_HIERARCHICAL_PAIRWISE = 34,
    /**
     * Reduce-scatter inside servers, a tree for each rail, all-gather inside.
     */
    SUMAC_PATH_HYBRID = 35,
    /**
     * Reduce inside servers, all-reduce of their leaders in a tree, broadcast inside.
     */
    SUMAC_PATH_RAB = 36,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_path sumac_path;
#else
typedef int32_t sumac_path;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How the payload moved between this rank and its leaf device.
 */
enum sumac_transfer
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The operation did not use the tree.
     */
    SUMAC_TRANSFER_NONE = 0,
    /**
     * In packets.
     */
    SUMAC_TRANSFER_PACKETS = 1,
    /**
     * The device read and wrote registered memory directly.
     */
    SUMAC_TRANSFER_ZERO_COPY = 2,
    /**
     * At least in part through a bounce buffer.
     */
    SUMAC_TRANSFER_BOUNCED = 3,
    /**
     * In a way that this version of the interface has no number for.
     */
    SUMAC_TRANSFER_OTHER = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_transfer sumac_transfer;
#else
typedef int32_t sumac_transfer;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What to do if ranks are late. Must be the same on all ranks.
 */
enum sumac_straggler
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Wait for late ranks until the call's deadline.
     */
    SUMAC_STRAGGLER_WAIT = 0,
    /**
     * Fail on all ranks with SUMAC_ERROR_STRAGGLERS.
     */
    SUMAC_STRAGGLER_DEADLINE = 1,
    /**
     * Complete without late ranks, which are removed from the communicator with SUMAC_ERROR_EXCLUDED.
     */
    SUMAC_STRAGGLER_PARTIAL = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sumac_straggler sumac_straggler;
#else
typedef int32_t sumac_straggler;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A rank's membership in a job. All ranks make the same calls on it in the same order. Any thread may use it, and
 * several at once; only sumac_comm_leave() and sumac_comm_free() must be the last. In a forked child every call
 * returns SUMAC_ERROR_FORKED.
 */
typedef struct sumac_comm sumac_comm;

/**
 * How a rank joins its job. Make one with sumac_config_from_env() or sumac_config_new(), change it with
 * sumac_config_set(), pass it to sumac_join(), and free it with sumac_config_free(). One thread at a time may use it.
 */
typedef struct sumac_config sumac_config;

/**
 * Why an operation would take a path: all paths with their costs, or why they are ruled out. Free it with
 * sumac_explanation_free().
 */
typedef struct sumac_explanation sumac_explanation;

/**
 * Registered memory: where this rank shares memory with its leaf device, operations on it are zero-copy. Elsewhere it
 * is ordinary memory, so programs need no special case. It may outlive its communicator.
 */
typedef struct sumac_memory sumac_memory;

/**
 * Options of a call. Every function that takes them takes NULL as well, for the communicator's defaults. A new object
 * has these defaults, too. It may be used for any number of calls; one thread at a time may change it.
 */
typedef struct sumac_options sumac_options;

/**
 * How a completed operation was carried out. Free it with sumac_outcome_free().
 */
typedef struct sumac_outcome sumac_outcome;

/**
 * An operation or a message that has been started. It goes on by itself; sumac_wait() returns its result and frees the
 * request. Its memory stays the caller's, who must neither change the input nor touch the output until then.
 */
typedef struct sumac_request sumac_request;

/**
 * A function that the library calls, from a thread of its own. Everything waits for it: it must return soon, must not
 * call this library, and must not throw an exception.
 */
typedef void (*Callback)(void *context);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Return the version of the library, such as "0.1.0".
 */
const char *sumac_version(void);

/**
 * All-reduce: combine `count` elements of all ranks; every rank gets the result. In place if `input` is `output`.
 * With SUMAC_MIN_LOC and SUMAC_MAX_LOC, an element is a pair of a value and an unsigned index of the same size.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_all_reduce(const struct sumac_comm *comm,
                              const void *input,
                              void *output,
                              uint64_t count,
                              int32_t dtype,
                              int32_t op,
                              const struct sumac_options *options,
                              struct sumac_outcome **outcome);

/**
 * Reduce: combine `count` elements of all ranks; `root` gets the result. `output` is not used by other ranks, and may
 * be NULL there. In place if `input` is `output`.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_reduce(const struct sumac_comm *comm,
                          const void *input,
                          void *output,
                          uint64_t count,
                          int32_t dtype,
                          int32_t op,
                          uint32_t root,
                          const struct sumac_options *options,
                          struct sumac_outcome **outcome);

/**
 * Broadcast the `count` elements of `root`'s `buffer` to all ranks.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `buffer` has
 * `count` elements, and nobody else uses it meanwhile.
 */
sumac_status sumac_broadcast(const struct sumac_comm *comm,
                             void *buffer,
                             uint64_t count,
                             int32_t dtype,
                             uint32_t root,
                             const struct sumac_options *options,
                             struct sumac_outcome **outcome);

/**
 * Reduce-scatter: combine all ranks' `input` of one block of `count` elements for each rank; rank r gets block r of
 * the result. In place if `output` is this rank's block in `input`: `input` may then be written to, and the contents
 * of its other blocks are unspecified afterwards.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_reduce_scatter(const struct sumac_comm *comm,
                                  const void *input,
                                  void *output,
                                  uint64_t count,
                                  int32_t dtype,
                                  int32_t op,
                                  const struct sumac_options *options,
                                  struct sumac_outcome **outcome);

/**
 * All-gather: every rank gets the `count` elements of each rank in `output`, in rank order. In place if `input` is
 * this rank's block in `output`.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_all_gather(const struct sumac_comm *comm,
                              const void *input,
                              void *output,
                              uint64_t count,
                              int32_t dtype,
                              const struct sumac_options *options,
                              struct sumac_outcome **outcome);

/**
 * Gather: `root` gets the `count` elements of each rank in `output`, in rank order. `output` is not used by other
 * ranks, and may be NULL there. In place if `input` is the root's block in its `output`.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_gather(const struct sumac_comm *comm,
                          const void *input,
                          void *output,
                          uint64_t count,
                          int32_t dtype,
                          uint32_t root,
                          const struct sumac_options *options,
                          struct sumac_outcome **outcome);

/**
 * Scatter: rank r gets block r, of `count` elements, of `root`'s `input`, which is not used by other ranks, and may be
 * NULL there. In place if `output` is the root's block in its `input`.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_scatter(const struct sumac_comm *comm,
                           const void *input,
                           void *output,
                           uint64_t count,
                           int32_t dtype,
                           uint32_t root,
                           const struct sumac_options *options,
                           struct sumac_outcome **outcome);

/**
 * All-to-all: rank r gets block r, of `count` elements, of every rank's `input`, in rank order. In place if `input` is
 * `output`.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have the lengths above, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_all_to_all(const struct sumac_comm *comm,
                              const void *input,
                              void *output,
                              uint64_t count,
                              int32_t dtype,
                              const struct sumac_options *options,
                              struct sumac_outcome **outcome);

/**
 * Barrier: wait until every rank has called this.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to.
 */
sumac_status sumac_barrier(const struct sumac_comm *comm,
                           const struct sumac_options *options,
                           struct sumac_outcome **outcome);

/**
 * Run any collective but SUMAC_ALL_TO_ALL_V, with any count: the numbers are a sumac_collective, a sumac_dtype and a
 * sumac_op (0 where there is none), and `count` is of the whole operation, so that the blocks of ranks may differ by
 * one element. `input_len` and `output_len` are in bytes, as the guide's table demands. In place if `input` is
 * `output` and the lengths are equal: the buffer then has the longer of both lengths.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. `input` and
 * `output` have these lengths, and nobody else writes to either or reads the output meanwhile.
 */
sumac_status sumac_run(const struct sumac_comm *comm,
                       int32_t collective,
                       int32_t dtype,
                       int32_t op,
                       uint32_t root,
                       uint64_t count,
                       const void *input,
                       size_t input_len,
                       void *output,
                       size_t output_len,
                       const struct sumac_options *options,
                       struct sumac_outcome **outcome);

/**
 * Join a job, and wait until all its ranks have joined. NULL for `config` stands for sumac_config_from_env(). `comm`
 * receives the communicator, or NULL.
 *
 * The caller promises:
 * `config` is NULL or a configuration; `comm` can be written to.
 */
sumac_status sumac_join(const struct sumac_config *config, struct sumac_comm **comm);

/**
 * Return this rank's number in the communicator, from 0; 0 for NULL.
 *
 * The caller promises:
 * `comm` is NULL or a communicator.
 */
uint32_t sumac_comm_rank(const struct sumac_comm *comm);

/**
 * Return the number of ranks of the communicator; 0 for NULL.
 *
 * The caller promises:
 * `comm` is NULL or a communicator.
 */
uint32_t sumac_comm_size(const struct sumac_comm *comm);

/**
 * Return the communicator's name: the job's, with a suffix for each split ("job/0.3") or shrink ("job~1"). Valid until
 * the communicator is freed; "" for NULL.
 *
 * The caller promises:
 * `comm` is NULL or a communicator.
 */
const char *sumac_comm_name(const struct sumac_comm *comm);

/**
 * Split a communicator, as MPI_Comm_split does: ranks with the same `color` (0 to 2^32 - 1) form a new one, ordered by
 * `key` and then by their rank. A rank with SUMAC_NO_COLOR gets none. This is a collective call. `split` receives the
 * new communicator, or NULL; the old one stays as it is.
 *
 * The caller promises:
 * `comm` is a communicator; `split` can be written to.
 */
sumac_status sumac_comm_split(const struct sumac_comm *comm, int64_t color, int64_t key, struct sumac_comm **split);

/**
 * Make a new communicator of the surviving ranks, in their present order, after SUMAC_ERROR_RANKS_FAILED or at any
 * other time. All survivors must call this. `shrunk` receives it, or NULL; the old one stays as it is, to be freed.
 *
 * The caller promises:
 * `comm` is a communicator; `shrunk` can be written to.
 */
sumac_status sumac_comm_shrink(const struct sumac_comm *comm, struct sumac_comm **shrunk);

/**
 * Leave the job gracefully: complete all started operations, and wait for other ranks that may still need this one, at
 * most for `seconds`; a negative number stands for the communicator's deadline. Frees the communicator in any case and
 * sets `*comm` to NULL. No other call may use it meanwhile.
 *
 * Returns SUMAC_ERROR_UNCONFIRMED if the time limit passed, or the error for which a started operation or an earlier
 * call failed. The rank has left all the same.
 *
 * The caller promises:
 * `*comm` is a communicator, which is not used any more.
 */
sumac_status sumac_comm_leave(struct sumac_comm **comm, double seconds);

/**
 * End the communicator, from any thread, also while a call on it blocks in another one. That call, or else the next
 * one, returns SUMAC_ERROR_CANCELLED, and every later one SUMAC_ERROR_ENDED. The other ranks are then told that this
 * rank is lost. Free the communicator afterwards. Not to be called from a signal handler.
 *
 * The caller promises:
 * `comm` is a communicator.
 */
sumac_status sumac_comm_abort(const struct sumac_comm *comm);

/**
 * Free a communicator without leaving: to the other ranks this rank is lost, and operations that it has not completed
 * fail on all of them. For communicators that have ended, and for forked children, where it has no effect on the job.
 * NULL is allowed.
 *
 * The caller promises:
 * `comm` is NULL or a communicator, which is not used any more.
 */
void sumac_comm_free(struct sumac_comm *comm);

/**
 * Read the recoveries so far: their number, the time spent in them, and the bytes that this rank sent for them. Each
 * pointer may be NULL.
 *
 * The caller promises:
 * `comm` is a communicator; the others are NULL or can be written to.
 */
sumac_status sumac_comm_recoveries(const struct sumac_comm *comm, uint32_t *count, double *seconds, uint64_t *bytes);

/**
 * Read what started operations and messages hold: their numbers, and the bytes of their buffers. Each pointer may be
 * NULL.
 *
 * The caller promises:
 * `comm` is a communicator; the others are NULL or can be written to.
 */
sumac_status sumac_comm_outstanding(const struct sumac_comm *comm, size_t *operations, size_t *messages, size_t *bytes);

/**
 * Configure a rank by what torchrun, mpirun, srun and `sumac run` set, and by SUMAC_* variables. Unset variables leave
 * the defaults. `config` receives the configuration, or NULL.
 *
 * The caller promises:
 * `config` can be written to.
 */
sumac_status sumac_config_from_env(struct sumac_config **config);

/**
 * Configure a rank by values: `controller` is "HOST", "HOST:PORT", or both of a pair after a comma; ranks that give
 * the same `job` to the same controller form a job, whose ranks count from 0 to `world` - 1. The environment is not
 * read. `config` receives the configuration, or NULL.
 *
 * The caller promises:
 * `controller` and `job` are C strings; `config` can be written to.
 */
sumac_status sumac_config_new(const char *controller,
                              const char *job,
                              uint32_t rank,
                              uint32_t world,
                              struct sumac_config **config);

/**
 * Change a setting: `name` is that of a SUMAC_* variable without "SUMAC_" and in lower case, and `value` is what the
 * variable would have. Examples: "order" "pairwise", "deadline" "2.5" (seconds), "key_file" "/etc/sumac/job.key",
 * "transport" "udp". The operations guide lists all of them. A refused setting changes nothing.
 *
 * The caller promises:
 * `config` is a configuration; `name` and `value` are C strings.
 */
sumac_status sumac_config_set(struct sumac_config *config, const char *name, const char *value);

/**
 * Choose whether started operations and messages go on by themselves, on a thread of the library, which blocking calls
 * are handed to as well. If not, what has been started advances only while another call of the communicator runs, and
 * sumac_test() may run a whole host collective. Not 0 stands for the thread, which is the default. Ranks may differ.
 *
 * The caller promises:
 * `config` is a configuration.
 */
sumac_status sumac_config_set_progress_thread(struct sumac_config *config, int32_t has_thread);

/**
 * Free a configuration. NULL is allowed. Communicators that were made with it do not need it.
 *
 * The caller promises:
 * `config` is NULL or a configuration, which is not used any more.
 */
void sumac_config_free(struct sumac_config *config);

/**
 * Explain which path an operation would take, with the numbers of sumac_run(). `algo` is the name of an algorithm, or
 * NULL for "auto". Runs nothing, and is no collective call. `explanation` receives the explanation, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `algo` is NULL or a C string, and `explanation` can be written to.
 */
sumac_status sumac_explain(const struct sumac_comm *comm,
                           int32_t collective,
                           int32_t dtype,
                           int32_t op,
                           uint32_t root,
                           uint64_t count,
                           const char *algo,
                           struct sumac_explanation **explanation);

/**
 * Return the explanation as a table, one path a line. Valid until the explanation is freed; "" for NULL.
 *
 * The caller promises:
 * `explanation` is NULL or an explanation.
 */
const char *sumac_explanation_text(const struct sumac_explanation *explanation);

/**
 * Return the path that would be taken: a sumac_path, SUMAC_PATH_NONE if the requested one is not possible.
 *
 * The caller promises:
 * `explanation` is NULL or an explanation.
 */
int32_t sumac_explanation_chosen(const struct sumac_explanation *explanation);

/**
 * Return the number of paths that were compared.
 *
 * The caller promises:
 * `explanation` is NULL or an explanation.
 */
size_t sumac_explanation_candidates(const struct sumac_explanation *explanation);

/**
 * Read a path that was compared, from 0: its number, its name, its cost in seconds (infinite if it is ruled out), and
 * why it is ruled out (NULL if it is not). Each pointer may be NULL; texts are valid until the explanation is freed.
 * Returns false, and writes nothing, if there is no such path.
 *
 * The caller promises:
 * `explanation` is NULL or an explanation; the others are NULL or can be written to.
 */
bool sumac_explanation_candidate(const struct sumac_explanation *explanation,
                                 size_t index,
                                 int32_t *path,
                                 const char **name,
                                 double *cost_s,
                                 const char **ruled_out);

/**
 * Free an explanation. NULL is allowed.
 *
 * The caller promises:
 * `explanation` is NULL or an explanation, which is not used any more.
 */
void sumac_explanation_free(struct sumac_explanation *explanation);

/**
 * Return the text of the last error of this thread, as Rust prints it: what happened, and what to do. "" if no call
 * of this thread has failed. It is valid until the next call of this thread fails.
 */
const char *sumac_last_error(void);

/**
 * Return the code of the last error of this thread; SUMAC_OK if no call of this thread has failed. Calls that succeed
 * do not reset it.
 */
sumac_status sumac_last_error_status(void);

/**
 * Return the code of the error that ended the communicator, if the last error of this thread is SUMAC_ERROR_ENDED;
 * otherwise the code of the last error. The functions below describe this error.
 */
sumac_status sumac_last_error_cause(void);

/**
 * Copy the ranks that the last error of this thread names, in ascending order: those that failed
 * (SUMAC_ERROR_RANKS_FAILED, SUMAC_ERROR_RANK_LOST) or were late (SUMAC_ERROR_STRAGGLERS). At most `capacity` are
 * copied; `ranks` may be NULL. Returns how many there are, 0 for all other errors.
 *
 * The caller promises:
 * `ranks` is NULL, or `capacity` elements can be written to it.
 */
size_t sumac_last_error_ranks(uint32_t *ranks, size_t capacity);

/**
 * Read one of the two calls of a SUMAC_ERROR_MISMATCH: `which` is 0 or 1, and the same at all ranks. For
 * SUMAC_ERROR_DEADLINE, SUMAC_ERROR_OUTCOME_UNKNOWN and SUMAC_ERROR_UNSUPPORTED, 0 is the failed call. `dtype` and
 * `op` are 0 where a call has none. Each pointer may be NULL. Returns false, and writes nothing, if there is no such
 * call.
 *
 * The caller promises:
 * Each pointer is NULL or can be written to.
 */
bool sumac_last_error_call(size_t which,
                           int32_t *collective,
                           int32_t *dtype,
                           int32_t *op,
                           uint32_t *root,
                           uint64_t *count);

/**
 * Read the number of the first collective that failed (SUMAC_ERROR_RANKS_FAILED): collectives on a communicator count
 * from 0. Returns false, and writes nothing, for all other errors.
 *
 * The caller promises:
 * `number` is NULL or can be written to.
 */
bool sumac_last_error_operation(uint64_t *number);

/**
 * Return what the output of the failed call holds. For SUMAC_OUTPUT_ELEMENTS, `begins` and `ends` receive the ranges
 * of elements that hold results, at most `capacity` of each, in ascending order; the end is the element behind a
 * range. `count` receives how many ranges there are. Each pointer may be NULL.
 *
 * The caller promises:
 * `begins` and `ends` are NULL, or `capacity` elements can be written to each; `count` is NULL or can be written to.
 */
sumac_output_state sumac_last_error_output(uint64_t *begins, uint64_t *ends, size_t capacity, size_t *count);

/**
 * Return the name of a status code, such as "SUMAC_ERROR_MISMATCH"; "unknown" for other numbers. Never NULL.
 */
const char *sumac_status_name(int32_t status);

/**
 * Return whether a call that returned this status had no effect at all: nothing was sent, buffers are unchanged, and
 * the call does not count in the common order of calls. Correct it and make it again. Any other error of a call ends
 * the communicator.
 */
bool sumac_status_is_rejection(int32_t status);

/**
 * Allocate `len` bytes of zeroed, registered memory, aligned to 8 bytes at least. `memory` receives the object that
 * owns it, or NULL. A call may use any part of it.
 *
 * The caller promises:
 * `comm` is a communicator; `memory` can be written to.
 */
sumac_status sumac_memory_alloc(const struct sumac_comm *comm, size_t len, struct sumac_memory **memory);

/**
 * Return the first byte; NULL for NULL. Valid until the memory is freed.
 *
 * The caller promises:
 * `memory` is NULL or memory.
 */
void *sumac_memory_data(const struct sumac_memory *memory);

/**
 * Return whether a device can reach the memory.
 *
 * The caller promises:
 * `memory` is NULL or memory.
 */
bool sumac_memory_is_registered(const struct sumac_memory *memory);

/**
 * Free memory. NULL is allowed. No operation that has been started on it may be in flight.
 *
 * The caller promises:
 * `memory` is NULL or memory, which is not used any more.
 */
void sumac_memory_free(struct sumac_memory *memory);

/**
 * Send `len` bytes to rank `to`, which receives them with the same tag and length. May block until the receiver is
 * ready. The n-th message from one rank to another meets the n-th receive.
 *
 * The caller promises:
 * `comm` is a communicator; `bytes` has `len` bytes, and nobody writes to them meanwhile.
 */
sumac_status sumac_send(const struct sumac_comm *comm, const void *bytes, size_t len, uint32_t to, uint32_t tag);

/**
 * Receive exactly `len` bytes from rank `from`, which sends them with the same tag.
 *
 * The caller promises:
 * `comm` is a communicator; `bytes` has `len` bytes, and nobody else uses them meanwhile.
 */
sumac_status sumac_receive(const struct sumac_comm *comm, void *bytes, size_t len, uint32_t from, uint32_t tag);

/**
 * Receive exactly `len` bytes from any other rank: the next message with this tag, from whichever rank's comes first,
 * unless a receive that was started before takes it. `source` may be NULL; otherwise it receives the sender's rank.
 *
 * The caller promises:
 * As for sumac_receive(); `source` is NULL or can be written to.
 */
sumac_status sumac_receive_any(const struct sumac_comm *comm, void *bytes, size_t len, uint32_t tag, uint32_t *source);

/**
 * Send `sent_len` bytes to rank `to` and receive `received_len` bytes from rank `from` at the same time, without
 * deadlock, for neighbours in a ring or a grid. The memory must not overlap.
 *
 * The caller promises:
 * `comm` is a communicator; both pointers have as many bytes, nobody writes to either and nobody reads what is
 * received meanwhile.
 */
sumac_status sumac_send_receive(const struct sumac_comm *comm,
                                const void *sent,
                                size_t sent_len,
                                uint32_t to,
                                void *received,
                                size_t received_len,
                                uint32_t from,
                                uint32_t tag);

/**
 * Start what sumac_send() does. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_send(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_send(const struct sumac_comm *comm,
                              const void *bytes,
                              size_t len,
                              uint32_t to,
                              uint32_t tag,
                              struct sumac_request **request);

/**
 * Start what sumac_receive() does. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_receive(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_receive(const struct sumac_comm *comm,
                                 void *bytes,
                                 size_t len,
                                 uint32_t from,
                                 uint32_t tag,
                                 struct sumac_request **request);

/**
 * Start what sumac_receive_any() does. `request` receives the request, or NULL; sumac_wait_message() says who sent.
 *
 * The caller promises:
 * As for sumac_start_receive().
 */
sumac_status sumac_start_receive_any(const struct sumac_comm *comm,
                                     void *bytes,
                                     size_t len,
                                     uint32_t tag,
                                     struct sumac_request **request);

/**
 * Make options with the communicator's defaults. `options` receives them, or NULL.
 *
 * The caller promises:
 * `options` can be written to.
 */
sumac_status sumac_options_new(struct sumac_options **options);

/**
 * Set the algorithm by name, such as "auto", "tree", "ring" or "hd". Must be the same on all ranks. One that is not
 * possible is an error of the call; no other one takes its place.
 *
 * The caller promises:
 * `options` are options; `algo` is a C string.
 */
sumac_status sumac_options_set_algo(struct sumac_options *options, const char *algo);

/**
 * Set how long the call may take, in seconds.
 *
 * The caller promises:
 * `options` are options.
 */
sumac_status sumac_options_set_deadline(struct sumac_options *options, double seconds);

/**
 * Set the factor that scales this rank's contribution, for SUMAC_PREMUL_SUM only. Default 1.
 *
 * The caller promises:
 * `options` are options.
 */
sumac_status sumac_options_set_scalar(struct sumac_options *options, double scalar);

/**
 * Set what to do if ranks enter the operation later than `seconds` after the first one: a sumac_straggler.
 * SUMAC_STRAGGLER_WAIT ignores `seconds`.
 *
 * The caller promises:
 * `options` are options.
 */
sumac_status sumac_options_set_straggler(struct sumac_options *options, int32_t policy, double seconds);

/**
 * Free options. NULL is allowed.
 *
 * The caller promises:
 * `options` are NULL or options, which are not used any more.
 */
void sumac_options_free(struct sumac_options *options);

/**
 * Return the outcome as one line: the path, and whatever is unusual. Valid until the outcome is freed; "" for NULL.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
const char *sumac_outcome_text(const struct sumac_outcome *outcome);

/**
 * Return the path that the operation took: a sumac_path. Later versions may add some.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
int32_t sumac_outcome_path(const struct sumac_outcome *outcome);

/**
 * Return the name of the path, such as "tree" or "ring". Valid until the outcome is freed; "" for NULL.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
const char *sumac_outcome_path_name(const struct sumac_outcome *outcome);

/**
 * Return how many trees the operation was spread over; 0 if it took none.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
uint32_t sumac_outcome_trees(const struct sumac_outcome *outcome);

/**
 * Return how the payload moved between this rank and its leaf device: a sumac_transfer.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
int32_t sumac_outcome_transfer(const struct sumac_outcome *outcome);

/**
 * Return why the operation did not use the tree, if the algorithm was left open; NULL if it did, or was told which one
 * to use. Valid until the outcome is freed.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
const char *sumac_outcome_fallback(const struct sumac_outcome *outcome);

/**
 * Return the bytes that this rank sent during the operation, with headers, or that its leaf device read from its
 * memory.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
uint64_t sumac_outcome_wire_bytes(const struct sumac_outcome *outcome);

/**
 * Return how many contributions this rank retransmitted.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
uint64_t sumac_outcome_retransmits(const struct sumac_outcome *outcome);

/**
 * Return whether the operation was interrupted by a failure and recovered.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome.
 */
bool sumac_outcome_recovered(const struct sumac_outcome *outcome);

/**
 * Read the rank that entered the operation last, and how many microseconds after the first one. Each pointer may be
 * NULL. Returns false, and writes nothing, if it is not known: for host collectives and after a recovery.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome; `rank` and `late_us` are NULL or can be written to.
 */
bool sumac_outcome_slowest(const struct sumac_outcome *outcome, uint32_t *rank, uint32_t *late_us);

/**
 * Copy the ranks that did not contribute to the result (SUMAC_STRAGGLER_PARTIAL), in ascending order. At most
 * `capacity` are copied; `ranks` may be NULL. Returns how many there are.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome; `ranks` is NULL, or `capacity` elements can be written to it.
 */
size_t sumac_outcome_missing(const struct sumac_outcome *outcome, uint32_t *ranks, size_t capacity);

/**
 * Free an outcome. NULL is allowed.
 *
 * The caller promises:
 * `outcome` is NULL or an outcome, which is not used any more.
 */
void sumac_outcome_free(struct sumac_outcome *outcome);

/**
 * Find out whether an operation has completed or failed, so that sumac_wait() returns at once. Never waits, unless the
 * library has no thread (sumac_config_set_progress_thread()): then it may run a whole host collective.
 *
 * The caller promises:
 * `request` is a request; `is_complete` can be written to.
 */
sumac_status sumac_test(const struct sumac_request *request, bool *is_complete);

/**
 * Wait for an operation within the communicator's deadline, return its result, free the request and set `*request` to
 * NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL for a message.
 *
 * The caller promises:
 * `*request` is a request that no other thread uses; `outcome` is NULL or can be written to.
 */
sumac_status sumac_wait(struct sumac_request **request, struct sumac_outcome **outcome);

/**
 * Wait for a message as sumac_wait() does. `source` may be NULL; otherwise it receives the rank at the other end.
 *
 * The caller promises:
 * `*request` is a request that no other thread uses; `source` is NULL or can be written to.
 */
sumac_status sumac_wait_message(struct sumac_request **request, uint32_t *source);

/**
 * Wait until any of `count` requests has completed, at most for `seconds`; a negative number stands for no limit.
 * Then do what sumac_wait() does with it, and write its place in the array to `index`. NULL requests are left out; if
 * all are NULL, that is SUMAC_ERROR_ARGUMENT. If the time limit passes, that is SUMAC_ERROR_TIMEOUT: nothing is freed,
 * and all operations go on.
 *
 * The caller promises:
 * `requests` has `count` elements, each NULL or a request that no other thread uses; `index` can be written to;
 * `outcome` is NULL or can be written to.
 */
sumac_status sumac_wait_any(struct sumac_request **requests,
                            size_t count,
                            double seconds,
                            size_t *index,
                            struct sumac_outcome **outcome);

/**
 * Get a file descriptor that becomes readable when the operation has completed or failed, for poll, epoll or an event
 * loop. It belongs to the request, and is closed with it: do not close it, and stop watching it before sumac_wait().
 *
 * The caller promises:
 * `request` is a request; `fd` can be written to.
 */
sumac_status sumac_request_fd(const struct sumac_request *request, int32_t *fd);

/**
 * Call `callback` with `context` when the operation has completed or failed: once, from a thread of the library, or
 * at once if it has. A second callback takes the place of the first. NULL takes it back, if it was not called yet.
 *
 * The caller promises:
 * `request` is a request; the callback may be called from any thread with this context.
 */
sumac_status sumac_request_on_completion(const struct sumac_request *request, Callback callback, void *context);

/**
 * Give a request up: the operation goes on, because the other ranks need it. Frees the request and sets `*request` to
 * NULL. The memory must stay as it is until the operation has ended: then `released` is called with `context`, once,
 * from any thread, or at once. `released` may be NULL for memory that stays until the communicator is gone.
 *
 * The caller promises:
 * `*request` is a request that no other thread uses; the function may be called from any thread with this context.
 */
sumac_status sumac_request_detach(struct sumac_request **request, Callback released, void *context);

/**
 * Start what sumac_all_reduce() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_all_reduce(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_all_reduce(const struct sumac_comm *comm,
                                    const void *input,
                                    void *output,
                                    uint64_t count,
                                    int32_t dtype,
                                    int32_t op,
                                    const struct sumac_options *options,
                                    struct sumac_request **request);

/**
 * Start what sumac_reduce() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_reduce(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_reduce(const struct sumac_comm *comm,
                                const void *input,
                                void *output,
                                uint64_t count,
                                int32_t dtype,
                                int32_t op,
                                uint32_t root,
                                const struct sumac_options *options,
                                struct sumac_request **request);

/**
 * Start what sumac_broadcast() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_broadcast(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_broadcast(const struct sumac_comm *comm,
                                   void *buffer,
                                   uint64_t count,
                                   int32_t dtype,
                                   uint32_t root,
                                   const struct sumac_options *options,
                                   struct sumac_request **request);

/**
 * Start what sumac_reduce_scatter() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_reduce_scatter(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_reduce_scatter(const struct sumac_comm *comm,
                                        const void *input,
                                        void *output,
                                        uint64_t count,
                                        int32_t dtype,
                                        int32_t op,
                                        const struct sumac_options *options,
                                        struct sumac_request **request);

/**
 * Start what sumac_all_gather() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_all_gather(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_all_gather(const struct sumac_comm *comm,
                                    const void *input,
                                    void *output,
                                    uint64_t count,
                                    int32_t dtype,
                                    const struct sumac_options *options,
                                    struct sumac_request **request);

/**
 * Start what sumac_gather() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_gather(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_gather(const struct sumac_comm *comm,
                                const void *input,
                                void *output,
                                uint64_t count,
                                int32_t dtype,
                                uint32_t root,
                                const struct sumac_options *options,
                                struct sumac_request **request);

/**
 * Start what sumac_scatter() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_scatter(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_scatter(const struct sumac_comm *comm,
                                 const void *input,
                                 void *output,
                                 uint64_t count,
                                 int32_t dtype,
                                 uint32_t root,
                                 const struct sumac_options *options,
                                 struct sumac_request **request);

/**
 * Start what sumac_all_to_all() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_all_to_all(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_all_to_all(const struct sumac_comm *comm,
                                    const void *input,
                                    void *output,
                                    uint64_t count,
                                    int32_t dtype,
                                    const struct sumac_options *options,
                                    struct sumac_request **request);

/**
 * Start a barrier: it completes when every rank has called one. `options` may be NULL. `request` receives the request,
 * or NULL.
 *
 * The caller promises:
 * As for sumac_barrier(); `request` can be written to.
 */
sumac_status sumac_start_barrier(const struct sumac_comm *comm,
                                 const struct sumac_options *options,
                                 struct sumac_request **request);

/**
 * Start what sumac_run() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_run(), and the memory stays as it is until the request has been waited for, or its memory
 * released.
 */
sumac_status sumac_start_run(const struct sumac_comm *comm,
                             int32_t collective,
                             int32_t dtype,
                             int32_t op,
                             uint32_t root,
                             uint64_t count,
                             const void *input,
                             size_t input_len,
                             void *output,
                             size_t output_len,
                             const struct sumac_options *options,
                             struct sumac_request **request);

/**
 * All-to-all with blocks of any length: send `send_counts[r]` elements of `input` to each rank r, and receive
 * `recv_counts[r]` elements from it in `output`. Both arrays have an element for each rank, and blocks lie behind each
 * other in rank order. What a rank sends must be as long as what its peer receives.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
 * an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
 * either or reads the output meanwhile.
 */
sumac_status sumac_all_to_all_v(const struct sumac_comm *comm,
                                const void *input,
                                const size_t *send_counts,
                                void *output,
                                const size_t *recv_counts,
                                int32_t dtype,
                                const struct sumac_options *options,
                                struct sumac_outcome **outcome);

/**
 * All-gather with blocks of any length: every rank r contributes `counts[r]` elements, and all get all blocks behind
 * each other, in rank order. The counts have an element for each rank, and are the same on all ranks.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
 * an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
 * either or reads the output meanwhile.
 */
sumac_status sumac_all_gather_v(const struct sumac_comm *comm,
                                const void *input,
                                void *output,
                                const size_t *counts,
                                int32_t dtype,
                                const struct sumac_options *options,
                                struct sumac_outcome **outcome);

/**
 * Reduce-scatter with blocks of any length: combine `input` of all ranks; rank r gets `counts[r]` elements of the
 * result, behind those of the ranks before it. The counts have an element for each rank, and are the same on all
 * ranks.
 *
 * `options` may be NULL. `outcome` may be NULL; otherwise it receives how the operation was carried out, or NULL.
 *
 * The caller promises:
 * `comm` is a communicator, `options` are NULL or options, and `outcome` is NULL or can be written to. The counts have
 * an element for each rank, and `input` and `output` as many elements as follow from them. Nobody else writes to
 * either or reads the output meanwhile.
 */
sumac_status sumac_reduce_scatter_v(const struct sumac_comm *comm,
                                    const void *input,
                                    const size_t *counts,
                                    void *output,
                                    int32_t dtype,
                                    int32_t op,
                                    const struct sumac_options *options,
                                    struct sumac_outcome **outcome);

/**
 * Start what sumac_all_to_all_v() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_all_to_all_v(), and the memory stays as it is until the request has been waited for, or its memory
 * released; not the counts, which are copied.
 */
sumac_status sumac_start_all_to_all_v(const struct sumac_comm *comm,
                                      const void *input,
                                      const size_t *send_counts,
                                      void *output,
                                      const size_t *recv_counts,
                                      int32_t dtype,
                                      const struct sumac_options *options,
                                      struct sumac_request **request);

/**
 * Start what sumac_all_gather_v() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_all_gather_v(), and the memory stays as it is until the request has been waited for, or its memory
 * released; not the counts, which are copied.
 */
sumac_status sumac_start_all_gather_v(const struct sumac_comm *comm,
                                      const void *input,
                                      void *output,
                                      const size_t *counts,
                                      int32_t dtype,
                                      const struct sumac_options *options,
                                      struct sumac_request **request);

/**
 * Start what sumac_reduce_scatter_v() does. `options` may be NULL. `request` receives the request, or NULL.
 *
 * The caller promises:
 * As for sumac_reduce_scatter_v(), and the memory stays as it is until the request has been waited for, or its memory
 * released; not the counts, which are copied.
 */
sumac_status sumac_start_reduce_scatter_v(const struct sumac_comm *comm,
                                          const void *input,
                                          const size_t *counts,
                                          void *output,
                                          int32_t dtype,
                                          int32_t op,
                                          const struct sumac_options *options,
                                          struct sumac_request **request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SUMAC_H */
