/* A stand-in for CUDA's driver and NCCL, for machines without a GPU: the functions that src/parallel/nccl.rs and src/machine/gpu.rs call, with their published signatures, on memory of the host and
 * between the threads of one process. One library under both names (libcuda.so.1, libnccl.so.2). Non-blocking as NCCL: the first answers are "in progress", and an operation is done when every
 * part of it has arrived. It shows that the calls fit together, not that NCCL does what this does.
 *
 * STAND_IN_GPUS: number of GPUs (4). STAND_IN_FAIL=N: the Nth operation of every communicator ends with an error. STAND_IN_SILENT=1: operations of process 1 never leave it.
 * STAND_IN_VERSION: NCCL's version code (22805).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int setting(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value && *value ? atoi(value) : otherwise;
}

/* --- messages between communicators of one world --- */

typedef struct Message {
  struct Message *next;
  char world[128];
  int from, to;
  size_t size;
  void *data;
} Message;

static Message *mail;

static void post(const char *world, int from, int to, const void *data, size_t size) {
  Message *message = calloc(1, sizeof *message);
  memcpy(message->world, world, 128);
  message->from = from;
  message->to = to;
  message->size = size;
  message->data = malloc(size + 1);
  memcpy(message->data, data, size);
  Message **end = &mail;
  while (*end) end = &(*end)->next;
  *end = message;
}

/* The first message from one process to another, taken out; its size must fit. */
static Message *take(const char *world, int from, int to) {
  for (Message **at = &mail; *at; at = &(*at)->next) {
    Message *message = *at;
    if (message->from == from && message->to == to && !memcmp(message->world, world, 128)) {
      *at = message->next;
      return message;
    }
  }
  return NULL;
}

/* --- communicators and what they wait for --- */

typedef struct {
  char internal[128];
} UniqueId;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, rest[3];
  const char *net_name;
  int split_share;
} Config;

typedef struct Pending {
  struct Pending *next;
  int from;
  char *to;
  size_t size;
  int adds;
} Pending;

typedef struct Comm {
  char world[128];
  int rank, ranks, polls, operations, result;
  Pending *pending;
} Comm;

typedef struct Stream {
  Comm *comm;
} Stream;

static void wait_for(Comm *comm, Stream *stream, int from, void *to, size_t size, int adds) {
  stream->comm = comm;
  Pending *pending = calloc(1, sizeof *pending);
  *pending = (Pending){NULL, from, to, size, adds};
  Pending **end = &comm->pending;
  while (*end) end = &(*end)->next;
  *end = pending;
}

static void progress(Comm *comm) {
  while (comm->pending) {
    Pending *first = comm->pending;
    Message *message = take(comm->world, first->from, comm->rank);
    if (!message) return;
    if (message->size != first->size) comm->result = 5; /* invalid usage */
    else if (first->adds)
      for (size_t i = 0; i < first->size / 4; i++) ((float *)first->to)[i] += ((float *)message->data)[i];
    else memcpy(first->to, message->data, first->size);
    comm->pending = first->next;
    free(first);
    free(message->data);
    free(message);
  }
}

static int begun(Comm *comm) {
  comm->operations++;
  comm->polls = 2;
  if (comm->operations == setting("STAND_IN_FAIL", -1)) comm->result = 6; /* remote error */
  return 7; /* in progress */
}

static void leave(Comm *comm, int to, const void *data, size_t size) {
  if (setting("STAND_IN_SILENT", 0) && comm->rank == 1) return;
  post(comm->world, comm->rank, to, data, size);
}

/* --- NCCL --- */

static size_t width(int type) { return type == 7 ? 4 : 1; }

int ncclGetVersion(int *version) { return *version = setting("STAND_IN_VERSION", 22805), 0; }

int ncclGetUniqueId(UniqueId *id) {
  static unsigned char count;
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 7 + count);
  count++;
  return 0;
}

const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited or there was a network error" : "invalid usage"; }
const char *ncclGetLastError(void *comm) { return (void)comm, "stand-in: on purpose\nmore"; }

int ncclCommInitRankConfig(Comm **comm, int ranks, UniqueId id, int rank, Config *config) {
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->blocking || config->net_name || config->split_share >= 0) return 4;
  for (int i = 1; i < 128; i++) if ((char)(id.internal[i] - id.internal[i - 1]) != 7) return 4;
  *comm = calloc(1, sizeof **comm);
  memcpy((*comm)->world, id.internal, 128);
  (*comm)->rank = rank;
  (*comm)->ranks = ranks;
  (*comm)->polls = 3;
  return 7;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  pthread_mutex_lock(&lock);
  *state = comm->result ? comm->result : comm->polls > 0 ? (comm->polls--, 7) : 0;
  pthread_mutex_unlock(&lock);
  return 0;
}

int ncclCommAbort(Comm *comm) { return free(comm), 0; }
int ncclCommDestroy(Comm *comm) { return free(comm), 0; }
int ncclCommFinalize(Comm *comm) { return comm->polls = 2, 7; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 7; }

int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, Stream *stream) {
  pthread_mutex_lock(&lock);
  stream->comm = comm;
  leave(comm, peer, from, count * width(type));
  pthread_mutex_unlock(&lock);
  return begun(comm);
}

int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, Stream *stream) {
  pthread_mutex_lock(&lock);
  wait_for(comm, stream, peer, to, count * width(type), 0);
  pthread_mutex_unlock(&lock);
  return begun(comm);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Stream *stream) {
  size_t size = count * width(type);
  pthread_mutex_lock(&lock);
  for (int peer = 0; peer < comm->ranks; peer++) {
    leave(comm, peer, from, size);
    wait_for(comm, stream, peer, (char *)to + peer * size, size, 0);
  }
  pthread_mutex_unlock(&lock);
  return begun(comm);
}

/* Adds up in the order of ranks, as the sum in place of this one's begins with nothing. */
static int sum(const char *from, char *to, size_t size, int parts, Comm *comm, Stream *stream) {
  pthread_mutex_lock(&lock);
  for (int peer = 0; peer < comm->ranks; peer++) leave(comm, peer, from + (parts > 1 ? peer * size : 0), size);
  memset(to, 0, size);
  for (int peer = 0; peer < comm->ranks; peer++) wait_for(comm, stream, peer, to, size, 1);
  pthread_mutex_unlock(&lock);
  return begun(comm);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, Stream *stream) {
  return type != 7 || op != 0 ? 4 : sum(from, to, count * 4, 1, comm, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, Stream *stream) {
  return type != 7 || op != 0 ? 4 : sum(from, to, count * 4, comm->ranks, comm, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, Stream *stream) {
  size_t size = count * width(type);
  pthread_mutex_lock(&lock);
  if (comm->rank == root)
    for (int peer = 0; peer < comm->ranks; peer++) leave(comm, peer, from, size);
  wait_for(comm, stream, root, to, size, 0);
  pthread_mutex_unlock(&lock);
  return begun(comm);
}

/* --- CUDA's driver --- */

typedef unsigned long long Pointer;

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDeviceGetCount(int *count) { return *count = setting("STAND_IN_GPUS", 4), 0; }
int cuDeviceGet(int *device, int ordinal) { return ordinal < setting("STAND_IN_GPUS", 4) ? (*device = ordinal, 0) : 101; }
int cuDriverGetVersion(int *version) { return *version = 12040, 0; }
int cuDeviceGetName(char *name, int size, int device) { return (void)size, strcpy(name, "Stand-in 0"), name[9] += device, 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = (size_t)80 << 30, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = attribute == 75 ? 7 + 2 * device : 0, 0; }
int cuMemGetInfo_v2(size_t *rest, size_t *total) { return *rest = (size_t)60 << 30, *total = (size_t)80 << 30, 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 0xa0 + device, 16), 0; }
int cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(device + 1), 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuStreamCreate(Stream **stream, unsigned flags) { return (void)flags, *stream = calloc(1, sizeof **stream), 0; }
int cuStreamDestroy_v2(Stream *stream) { return free(stream), 0; }
int cuStreamSynchronize(Stream *stream) { return stream ? 0 : 400; }
int cuEventCreate(Stream ***event, unsigned flags) { return (void)flags, *event = calloc(1, sizeof **event), 0; }
int cuEventDestroy_v2(Stream **event) { return free(event), 0; }
int cuEventRecord(Stream **event, Stream *stream) { return *event = stream, 0; }

int cuEventQuery(Stream **event) {
  Comm *comm = *event ? (*event)->comm : NULL;
  int waits = 0;
  pthread_mutex_lock(&lock);
  if (comm) progress(comm), waits = comm->pending != NULL;
  pthread_mutex_unlock(&lock);
  return waits ? 600 : 0;
}

int cuMemAlloc_v2(Pointer *pointer, size_t size) { return *pointer = (uintptr_t)malloc(size), *pointer ? 0 : 2; }
int cuMemFree_v2(Pointer pointer) { return free((void *)(uintptr_t)pointer), 0; }
int cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t size, Stream *stream) { return (void)stream, memcpy((void *)(uintptr_t)to, from, size), 0; }
int cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t size, Stream *stream) { return (void)stream, memcpy(to, (void *)(uintptr_t)from, size), 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "stand-in: an error", 0; }
int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }
