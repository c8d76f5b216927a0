// The part of the public CUDA driver ABI that the soft device implements: types, codes and layouts.
// Written from the public documentation, so that no CUDA toolkit is needed.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_opaque*;
using CUmodule = struct CUmod_opaque*;
using CUfunction = struct CUfunc_opaque*;
using CUkernel = struct CUkern_opaque*;
using CUstream = struct CUstream_opaque*;
using CUevent = struct CUevent_opaque*;
using CUgraph = struct CUgraph_opaque*;
using CUgraphNode = struct CUnode_opaque*;
using CUgraphExec = struct CUexec_opaque*;
using CUuserObject = struct CUobject_opaque*;
using CUhostFn = void (*)(void*);

enum : CUresult {
#define E(code, name) name = code,
#include "cuda_errors.inc"
#undef E
};

enum : unsigned {
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_EVENT_INTERPROCESS = 4,
  CU_MEMHOSTALLOC_DEVICEMAP = 2,
  CU_MEMHOSTALLOC_WRITECOMBINED = 4,
  CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1,
  CU_GRAPH_USER_OBJECT_MOVE = 1,
};

enum CUmemorytype : unsigned {
  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_MEMORYTYPE_ARRAY = 3,
  CU_MEMORYTYPE_UNIFIED = 4
};

enum CUgraphNodeType : int {
  CU_GRAPH_NODE_TYPE_KERNEL = 0,
  CU_GRAPH_NODE_TYPE_MEMCPY = 1,
  CU_GRAPH_NODE_TYPE_MEMSET = 2,
  CU_GRAPH_NODE_TYPE_HOST = 3,
  CU_GRAPH_NODE_TYPE_GRAPH = 4,
  CU_GRAPH_NODE_TYPE_EMPTY = 5,
  CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6,
  CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7,
  CU_GRAPH_NODE_TYPE_BATCH_MEM_OP = 12,
  CU_GRAPH_NODE_TYPE_CONDITIONAL = 13,
};

enum : int {
  CU_GRAPH_EXEC_UPDATE_SUCCESS = 0,
  CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED = 2,
  CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED = 3,
  CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED = 6,
};

struct CUDA_KERNEL_NODE_PARAMS {
  CUfunction func;
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  void** kernelParams;
  void** extra;
  void* kern;
  CUcontext ctx;
};
static_assert(sizeof(CUDA_KERNEL_NODE_PARAMS) == 72, "driver ABI");

struct CUDA_MEMSET_NODE_PARAMS {
  CUdeviceptr dst;
  size_t pitch;
  unsigned value;
  unsigned elementSize;
  size_t width;
  size_t height;
};
static_assert(sizeof(CUDA_MEMSET_NODE_PARAMS) == 40, "driver ABI");

struct CUDA_HOST_NODE_PARAMS {
  CUhostFn fn;
  void* userData;
};

struct CUDA_HOST_NODE_PARAMS_v2 {
  CUhostFn fn;
  void* userData;
  unsigned syncMode;
  CUcontext ctx;
};

enum : int { CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE = 0, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE = 1 };

struct CUDA_CHILD_GRAPH_NODE_PARAMS {
  CUgraph graph;
  int ownership;
};

enum : int {
  CU_GRAPH_COND_TYPE_IF = 0,
  CU_GRAPH_COND_TYPE_WHILE = 1,
};

struct CUDA_CONDITIONAL_NODE_PARAMS {
  uint64_t handle;
  int type;
  unsigned size;
  CUgraph* phGraph_out;
  CUcontext ctx;
};
static_assert(sizeof(CUDA_CONDITIONAL_NODE_PARAMS) == 32, "driver ABI");

// The fields of CUDA_MEMCPY3D that begin with "src", or those that begin with "dst".
struct CopyEnd {
  size_t x_in_bytes, y, z, lod;
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  void* array;
  void* reserved;
  size_t pitch, height;
};

struct CUDA_MEMCPY3D {
  CopyEnd src, dst;
  size_t WidthInBytes, Height, Depth;
};
static_assert(sizeof(CUDA_MEMCPY3D) == 200, "driver ABI");

struct CUDA_MEMCPY_NODE_PARAMS {
  int flags;
  int reserved;
  CUcontext copyCtx;
  CUDA_MEMCPY3D copyParams;
};

enum CUstreamBatchMemOpType : int {
  CU_STREAM_MEM_OP_WAIT_VALUE_32 = 1,
  CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2,
  CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES = 3,
  CU_STREAM_MEM_OP_WAIT_VALUE_64 = 4,
  CU_STREAM_MEM_OP_WRITE_VALUE_64 = 5,
  CU_STREAM_MEM_OP_BARRIER = 6,
  CU_STREAM_MEM_OP_ATOMIC_REDUCTION = 8,
};

enum : unsigned {
  CU_STREAM_WAIT_VALUE_GEQ = 0,
  CU_STREAM_WAIT_VALUE_EQ = 1,
  CU_STREAM_WAIT_VALUE_AND = 2,
  CU_STREAM_WAIT_VALUE_NOR = 3,
  CU_STREAM_WAIT_VALUE_FLUSH = 1u << 30,
  CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER = 1,
};

struct CUstreamMemOpWaitValueParams {
  CUstreamBatchMemOpType operation;
  CUdeviceptr address;
  union {
    uint32_t value;
    uint64_t value64;
  };
  unsigned flags;
  CUdeviceptr alias;
};

struct CUstreamMemOpMemoryBarrierParams {
  CUstreamBatchMemOpType operation;
  unsigned flags;
};

union CUstreamBatchMemOpParams {
  CUstreamBatchMemOpType operation;
  CUstreamMemOpWaitValueParams waitValue;
  CUstreamMemOpWaitValueParams writeValue;
  CUstreamMemOpMemoryBarrierParams memoryBarrier;  // same layout as flushRemoteWrites
  uint64_t pad[6];
};
static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "driver ABI");

struct CUDA_BATCH_MEM_OP_NODE_PARAMS {
  CUcontext ctx;
  unsigned count;
  CUstreamBatchMemOpParams* paramArray;
  unsigned flags;
};
static_assert(sizeof(CUDA_BATCH_MEM_OP_NODE_PARAMS) == 32, "driver ABI");

struct CUgraphNodeParams {
  CUgraphNodeType type;
  int reserved0[3];
  union {
    long long reserved1[29];
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMCPY_NODE_PARAMS memcpy;
    CUDA_MEMSET_NODE_PARAMS memset;
    CUDA_BATCH_MEM_OP_NODE_PARAMS memOp;
    CUDA_HOST_NODE_PARAMS_v2 host;
    CUDA_CHILD_GRAPH_NODE_PARAMS graph;
    CUevent event;  // for an event record or event wait node
    CUDA_CONDITIONAL_NODE_PARAMS conditional;
  };
  long long reserved2;
};
static_assert(sizeof(CUgraphNodeParams) == 256, "driver ABI");

struct CUgraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};

struct CUlaunchAttribute {
  int id;
  char pad[4];
  char value[64];
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

struct CUDA_GRAPH_INSTANTIATE_PARAMS {
  uint64_t flags;
  CUstream hUploadStream;
  CUgraphNode hErrNode_out;
  int result_out;
};

struct CUgraphExecUpdateResultInfo {
  int result;
  CUgraphNode errorNode;
  CUgraphNode errorFromNode;
};

}  // extern "C"
