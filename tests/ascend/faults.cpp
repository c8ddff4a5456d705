// Kernels with one planted fault each, and legal ones that must not be reported. A line marked "fault: NAME" must be
// named by the report of that case. Usage: faults CASE MODE SEED
#include <array>
#include <functional>
#include <map>

#include "harness.h"

using namespace AscendC;

constexpr uint32_t kElements = 256;

// The usual surroundings: input and output in GM, two tensors in UB, everything float.
struct Bench {
  GlobalTensor<float> in, out;
  LocalTensor<float> a{TPosition::VECIN, 0, kElements}, b{TPosition::VECIN, kElements * 4, kElements};

  __aicore__ Bench(GM_ADDR x, GM_ADDR y) {
    InitSocState();
    in.SetGlobalBuffer((__gm__ float*)x);
    out.SetGlobalBuffer((__gm__ float*)y);
  }
  __aicore__ ~Bench() noexcept(false) {  // a deadlock ends the block there
    if (!std::uncaught_exceptions()) PipeBarrier<PIPE_ALL>();
  }
  __aicore__ void Load() { DataCopy(a, in, kElements); }
  __aicore__ void Store() { DataCopy(out, b, kElements); }
};

template <HardEvent event>
__aicore__ void Sync(int id = 0) {
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

// The same with memory and event ids of a TPipe.
struct PipeBench {
  TPipe* pipe;
  TBuf<TPosition::VECIN> buffer_a, buffer_b;
  GlobalTensor<float> in, out;
  LocalTensor<float> a, b;

  __aicore__ PipeBench(TPipe* pipe, GM_ADDR x, GM_ADDR y) : pipe(pipe) {
    pipe->InitBuffer(buffer_a, kElements * sizeof(float));
    pipe->InitBuffer(buffer_b, kElements * sizeof(float));
    in.SetGlobalBuffer((__gm__ float*)x);
    out.SetGlobalBuffer((__gm__ float*)y);
    a = buffer_a.Get<float>();
    b = buffer_b.Get<float>();
  }
  __aicore__ void Load() { DataCopy(a, in, kElements); }
  __aicore__ void Store() { DataCopy(out, b, kElements); }
  template <HardEvent event>
  __aicore__ void Sync() {
    const TEventID id = pipe->AllocEventID<event>();
    ::Sync<event>(id);
    pipe->ReleaseEventID<event>(id);
  }
};

// Holds its TPipe itself.
struct Holder {
  TPipe pipe;
  __aicore__ Holder() {}  // fault: pipe_in_an_object
};

// Adds 1e8, -1e8 and in + 1 to zeros, in fp32: only this order yields in + 1.
__aicore__ void AddThree(GM_ADDR x, GM_ADDR y, bool ordered) {
  Bench t(x, y);
  Duplicate(t.b, 0.0f, kElements);
  Sync<HardEvent::V_MTE3>();
  t.Store();
  PipeBarrier<PIPE_MTE3>();
  t.Load();
  Sync<HardEvent::MTE2_V>();
  Adds(t.a, t.a, 1.0f, kElements);
  Sync<HardEvent::MTE3_V>();
  Duplicate(t.b, 1e8f, 64);
  Duplicate(t.b[64], -1e8f, 64);
  Sync<HardEvent::V_MTE3>();
  SetAtomicAdd<float>();
  DataCopy(t.out, t.b, 64);
  if (ordered) PipeBarrier<PIPE_MTE3>();
  DataCopy(t.out, t.b[64], 64);
  if (ordered) PipeBarrier<PIPE_MTE3>();
  DataCopy(t.out, t.a, 64);
  SetAtomicNone();
}

// Stores 1 and reads it with the scalar unit, stores 2 there: y[0] is now another one than the cached one.
__aicore__ void StoreTwice(Bench& t) {
  for (float value : {1.0f, 2.0f}) {
    Duplicate(t.b, value, kElements);
    Sync<HardEvent::V_MTE3>();
    Sync<HardEvent::S_MTE3>();
    t.Store();
    PipeBarrier<PIPE_MTE3>();
    Sync<HardEvent::MTE3_S>();
    Sync<HardEvent::MTE3_V>();
    if (value == 1.0f) DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(t.out);
    if (value == 1.0f && t.out.GetValue(0) != 1.0f) t.b.SetValue(0, 0.0f);
  }
}

using Queue = TQue<TPosition::VECIN, 1>;

std::map<std::string, std::function<void(GM_ADDR, GM_ADDR)>> cases = {
    {"legal_flags",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"legal_ping_pong",  // two halves of a buffer; "free" flags are set before the loop and waited for after it
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       SetFlag<HardEvent::V_MTE2>(0);
       SetFlag<HardEvent::V_MTE2>(1);
       SetFlag<HardEvent::MTE3_V>(0);
       SetFlag<HardEvent::MTE3_V>(1);
       for (int i = 0; i < 4; ++i) {
         const int half_id = i % 2, from = half_id * 64;
         WaitFlag<HardEvent::V_MTE2>(half_id);
         DataCopy(t.a[from], t.in[i * 64], 64);
         Sync<HardEvent::MTE2_V>(half_id);
         WaitFlag<HardEvent::MTE3_V>(half_id);
         Adds(t.b[from], t.a[from], 1.0f, 64);
         SetFlag<HardEvent::V_MTE2>(half_id);
         Sync<HardEvent::V_MTE3>(half_id);
         DataCopy(t.out[i * 64], t.b[from], 64);
         SetFlag<HardEvent::MTE3_V>(half_id);
       }
       WaitFlag<HardEvent::V_MTE2>(0);
       WaitFlag<HardEvent::V_MTE2>(1);
       WaitFlag<HardEvent::MTE3_V>(0);
       WaitFlag<HardEvent::MTE3_V>(1);
     }},
    {"legal_scalar_loop",  // out[i] = in[i] + 1 through the scalar unit, and V again after it
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       for (int pass = 0; pass < 3; ++pass) {
         Adds(t.b, t.a, 0.0f, kElements);
         Sync<HardEvent::V_S>();
         for (uint32_t i = 0; i < kElements; ++i) t.b.SetValue(i, t.b.GetValue(i) + 1.0f);
         Sync<HardEvent::S_V>();
       }
       Maxs(t.b, t.b, 0.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"legal_copy_queue",  // in through one queue without compute to the output, then back and + 1
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
       pipe.InitBuffer(queue, 2, 256);
       for (int i = 0; i < 4; ++i) {
         LocalTensor<float> part = queue.AllocTensor<float>();
         DataCopy(part, t.in[i * 64], 64);
         queue.EnQue(part);
         part = queue.DeQue<float>();
         DataCopy(t.out[i * 64], part, 64);
         queue.FreeTensor(part);
       }
       t.Sync<HardEvent::MTE3_MTE2>();
       DataCopy(t.a, t.out, kElements);
       PipeBarrier<PIPE_ALL>();
       Adds(t.b, t.a, 1.0f, kElements);
       PipeBarrier<PIPE_ALL>();
       t.Store();
     }},
    {"legal_accumulation",  // 64 lanes summed over 3 repeats into one; the result is 1, 2, 3, 4 again
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Duplicate(t.b, 0.0f, kElements);
       Sync<HardEvent::MTE2_V>();
       PipeBarrier<PIPE_V>();
       Add(t.b, t.a, t.b, 64, 3, BinaryRepeatParams(1, 1, 1, 0, 0, 0));
       PipeBarrier<PIPE_V>();
       Adds(t.b, t.b, 3.0f, 64);
       PipeBarrier<PIPE_V>();
       Muls(t.b, t.b, 1.0f / 3, 64);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"legal_index",  // 0, 1, 2, ... of a buffer that others have finished with, and + 1
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       t.Load();
       t.Sync<HardEvent::MTE2_V>();
       Duplicate(t.b, 0.0f, kElements);
       t.Sync<HardEvent::V_S>();
       CreateVecIndex(t.b, 0.0f, kElements);
       Adds(t.b, t.b, 1.0f, kElements);
       t.Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"legal_ordered_additions", [](GM_ADDR x, GM_ADDR y) { AddThree(x, y, true); }},
    {"additions_in_any_order", [](GM_ADDR x, GM_ADDR y) { AddThree(x, y, false); }},
    {"own_event_id_beside_a_pipe",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       const TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
       t.Load();
       ::Sync<HardEvent::MTE2_V>(id);
       SetFlag<HardEvent::MTE2_V>(id + 1);  // fault: own_event_id_beside_a_pipe
     }},
    {"waits_for_own_event_id",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       WaitFlag<HardEvent::MTE2_V>(0);  // fault: waits_for_own_event_id
     }},
    {"legal_fetched_id",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>(pipe.FetchEventID(HardEvent::MTE2_V));
       Adds(t.b, t.a, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>(pipe.FetchEventID(HardEvent::V_MTE3));
       t.Store();
     }},
    {"id_never_released",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;  // fault: id_never_released
       pipe.AllocEventID<HardEvent::MTE2_V>();
     }},
    {"id_released_twice",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       const TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
       pipe.ReleaseEventID<HardEvent::MTE2_V>(id);
       pipe.ReleaseEventID<HardEvent::MTE2_V>(id);  // fault: id_released_twice
     }},
    {"pads_into_veccalc",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       const LocalTensor<float> to(TPosition::VECCALC, 0, 64);
       const DataCopyExtParams copy(1, 4, 0, 0, 0);
       DataCopyPad(to, t.in, copy, DataCopyPadExtParams<float>());  // fault: pads_into_veccalc
     }},
    {"pads_from_veccalc",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       const LocalTensor<float> from(TPosition::VECCALC, 0, 64);
       DataCopyPad(t.out, from, DataCopyExtParams(1, 4, 0, 0, 0));  // fault: pads_from_veccalc
     }},
    {"pads_into_a_buffer_for_computing",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       TBuf<TPosition::VECCALC> buffer;
       pipe.InitBuffer(buffer, 256);
       const LocalTensor<int32_t> to = buffer.Get<float>()[8].ReinterpretCast<int32_t>();
       GlobalTensor<int32_t> in;
       in.SetGlobalBuffer((__gm__ int32_t*)x);
       const DataCopyExtParams copy(1, 4, 0, 0, 0);
       DataCopyPad(to, in, copy, DataCopyPadExtParams<int32_t>());  // fault: pads_into_a_buffer_for_computing
     }},
    {"pipe_in_an_object", [](GM_ADDR, GM_ADDR) { Holder holder; }},
    {"two_pipes",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       TPipe other;  // fault: two_pipes
     }},
    {"address_beside_a_pipe",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       LocalTensor<float> a(TPosition::VECIN, 0, kElements);  // fault: address_beside_a_pipe
     }},
    {"pipe_beside_addresses",
     [](GM_ADDR, GM_ADDR) {
       LocalTensor<float> a(TPosition::VECIN, 0, kElements);
       TPipe pipe;  // fault: pipe_beside_addresses
     }},
    {"address_beyond_ub",
     [](GM_ADDR, GM_ADDR) {
       LocalTensor<float> a(TPosition::VECIN, 196096, 65);  // fault: address_beyond_ub
     }},
    {"registers_in_any_state",
     [](GM_ADDR, GM_ADDR) {
       LocalTensor<float> a(TPosition::VECIN, 0, kElements);
       Duplicate(a, 0.0f, kElements);  // fault: registers_in_any_state
     }},
    {"ends_before_its_pipes",
     [](GM_ADDR, GM_ADDR) {
       InitSocState();
       LocalTensor<float> a(TPosition::VECIN, 0, kElements);
       PipeBarrier<PIPE_ALL>();
       Duplicate(a, 0.0f, kElements);  // fault: ends_before_its_pipes
     }},
    {"index_without_a_pipe",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       CreateVecIndex(t.a, 0.0f, kElements);  // fault: index_without_a_pipe
     }},
    {"infinity_becomes_finite",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.a, 1e9f, kElements);
       PipeBarrier<PIPE_V>();
       Cast(t.b.ReinterpretCast<half>(), t.a, RoundMode::CAST_RINT, 64);  // fault: infinity_becomes_finite
     }},
    {"half_sum_saturates",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       const LocalTensor<half> a = t.a.ReinterpretCast<half>(), b = t.b.ReinterpretCast<half>();
       Duplicate(a, half(6e4f), 64);
       PipeBarrier<PIPE_V>();
       Add(b, a, a, 64);  // fault: half_sum_saturates
     }},
    {"dropped_wait",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       SetFlag<HardEvent::MTE2_V>(0);
       Adds(t.b, t.a, 1.0f, kElements);  // fault: dropped_wait
       WaitFlag<HardEvent::MTE2_V>(0);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"no_flag_before_store",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);  // fault: no_flag_before_store
       t.Store();
     }},
    {"buffer_reused_too_early",  // the second load may overwrite what Adds still reads
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);  // fault: buffer_reused_too_early
       DataCopy(t.a, t.in[128], 128);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"swapped_event_id",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       SetFlag<HardEvent::MTE2_V>(0);
       WaitFlag<HardEvent::MTE2_V>(1);  // fault: swapped_event_id
       Adds(t.b, t.a, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"missing_set",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       WaitFlag<HardEvent::V_MTE3>(0);  // fault: missing_set
       t.Store();
     }},
    {"waits_in_a_circle",
     [](GM_ADDR, GM_ADDR) {
       WaitFlag<HardEvent::V_MTE2>(0);
       SetFlag<HardEvent::MTE2_V>(0);
       WaitFlag<HardEvent::MTE2_V>(0);  // fault: waits_in_a_circle
       SetFlag<HardEvent::V_MTE2>(0);
     }},
    {"leaked_flag",
     [](GM_ADDR, GM_ADDR) {
       SetFlag<HardEvent::MTE3_V>(2);  // fault: leaked_flag
     }},
    {"set_twice",
     [](GM_ADDR, GM_ADDR) {
       SetFlag<HardEvent::V_MTE3>(0);
       SetFlag<HardEvent::V_MTE3>(0);  // fault: set_twice
       WaitFlag<HardEvent::V_MTE3>(0);
     }},
    {"set_may_overtake_wait",
     [](GM_ADDR, GM_ADDR) {
       Sync<HardEvent::V_MTE3>();
       SetFlag<HardEvent::V_MTE3>(0);  // fault: set_may_overtake_wait
       WaitFlag<HardEvent::V_MTE3>(0);
     }},
    {"event_id_8",
     [](GM_ADDR, GM_ADDR) {
       SetFlag<HardEvent::V_MTE3>(8);  // fault: event_id_8
     }},
    {"event_id_6",
     [](GM_ADDR, GM_ADDR) {
       SetFlag<HardEvent::V_MTE3>(6);  // fault: event_id_6
     }},
    {"waits_for_event_id_7",
     [](GM_ADDR, GM_ADDR) {
       WaitFlag<HardEvent::V_MTE3>(7);  // fault: waits_for_event_id_7
     }},
    {"empty_mask",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, 64, 4, 1, 8);
       PipeBarrier<PIPE_V>();
       uint64_t none[2] = {0, 0};
       Abs(t.b, t.b, none, 4, UnaryRepeatParams());  // fault: empty_mask
     }},
    {"mask_of_0_lanes",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, uint64_t(0), 4, 1, 8);  // fault: mask_of_0_lanes
     }},
    {"overlap_in_one_repeat",  // each repeat writes one block behind what it reads, of which seven are its own
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Abs(t.a[8], t.a, 56, 3, UnaryRepeatParams(1, 1, 8, 8));  // fault: overlap_in_one_repeat
     }},
    {"overlap_of_widths",  // in place, from 4 bytes a lane to 2
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Cast(t.a.ReinterpretCast<half>(), t.a, RoundMode::CAST_RINT, 64);  // fault: overlap_of_widths
     }},
    {"overlap_of_lanes",  // a row that each lane of itself is divided by
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Sub(t.a, t.a, t.a, 64, 4, BinaryRepeatParams(1, 1, 0, 8, 8, 8));  // fault: overlap_of_lanes
     }},
    {"sum_over_its_source",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       WholeReduceSum(t.a, t.a, 64, 1, 1, 1, 8);  // fault: sum_over_its_source
     }},
    {"store_stays_in_the_cache",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.out.SetValue(200, 7.0f);  // fault: store_stays_in_the_cache
     }},
    {"load_of_what_is_in_the_cache",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       for (uint32_t i = 0; i < kElements; ++i) t.out.SetValue(i, 7.0f);
       Sync<HardEvent::S_MTE2>();
       DataCopy(t.a, t.out, kElements);  // fault: load_of_what_is_in_the_cache
     }},
    {"read_without_invalidation",  // the first read of this launch, of what this launch wrote
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       t.Store();
       Sync<HardEvent::MTE3_S>();
       (void)t.out.GetValue(200);  // fault: read_without_invalidation
     }},
    {"invalidated_too_early",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(t.out);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       t.Store();
       Sync<HardEvent::MTE3_S>();
       (void)t.out.GetValue(200);  // fault: invalidated_too_early
     }},
    {"legal_written_back",  // out[i] = in[i] + 1 by the scalar unit in GM, then moved to itself by the copies
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       for (uint32_t i = 0; i < kElements; ++i) t.out.SetValue(i, t.in.GetValue(i) + 1.0f);
       DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(t.out);
       Sync<HardEvent::S_MTE2>();
       DataCopy(t.b, t.out, kElements);
       Sync<HardEvent::MTE2_MTE3>();
       t.Store();
     }},
    {"no_barrier_in_v",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       Exp(t.b, t.b, kElements);  // fault: no_barrier_in_v
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"overwritten_while_read",  // in place, while the instruction before may still read
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       Muls(t.a, t.a, 2.0f, kElements);  // fault: overwritten_while_read
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"integers_saturate",  // SaturationMode::FLOAT is the switch of half and bfloat16_t
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       SetSaturationFlag<SaturationMode::FLOAT>(false);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       LocalTensor<int32_t> words = t.a.ReinterpretCast<int32_t>();
       Muls(t.b.ReinterpretCast<int32_t>(), words, int32_t(0x10001), kElements);  // fault: integers_saturate
     }},
    {"integer_sum_saturates",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       LocalTensor<int32_t> words = t.a.ReinterpretCast<int32_t>();
       Add(t.b.ReinterpretCast<int32_t>(), words, words, kElements);  // fault: integer_sum_saturates
     }},
    {"index_over_unread",  // its first block is written by the scalar unit, which does not wait
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       t.Load();
       t.Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       PipeBarrier<PIPE_V>();
       CreateVecIndex(t.a, 0.0f, kElements);  // fault: index_over_unread
       t.Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"index_over_unstored",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       Duplicate(t.b, 1.0f, kElements);
       t.Sync<HardEvent::V_MTE3>();
       t.Store();
       CreateVecIndex(t.b, 0.0f, kElements);  // fault: index_over_unstored
     }},
    {"atomic_left_on",
     [](GM_ADDR, GM_ADDR) {
       SetAtomicAdd<float>();  // fault: atomic_left_on
     }},
    {"adds_to_unwritten",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       SetAtomicAdd<float>();
       DataCopy(t.out, t.b, kElements);  // fault: adds_to_unwritten
       SetAtomicNone();
     }},
    {"writes_an_input",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       DataCopy(t.in, t.b, kElements);  // fault: writes_an_input
     }},
    {"scalar_reads_too_early",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       if (t.b.GetValue(0) == 5.0f) PipeBarrier<PIPE_V>();  // fault: scalar_reads_too_early
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"scalar_read_after_load",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopy(t.a, t.in, kElements);
       (void)t.a.GetValue(200);  // fault: scalar_read_after_load
     }},
    {"scalar_write_before_vector",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_S>();
       Sync<HardEvent::MTE2_V>();
       t.a.SetValue(200, 7.0f);
       Adds(t.b, t.a, 1.0f, kElements);  // fault: scalar_write_before_vector
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"scalar_write_before_load",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.a.SetValue(200, 7.0f);
       DataCopy(t.a, t.in, kElements);  // fault: scalar_write_before_load
     }},
    {"scalar_write_before_store",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_S>();
       Sync<HardEvent::V_MTE3>();
       t.b.SetValue(200, 7.0f);
       DataCopy(t.out, t.b, kElements);  // fault: scalar_write_before_store
     }},
    {"scalar_write_after_store",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 1.0f, kElements);
       Sync<HardEvent::V_S>();
       Sync<HardEvent::V_MTE3>();
       t.Store();
       t.b.SetValue(200, 7.0f);  // fault: scalar_write_after_store
     }},
    {"overlap_in_one_instruction",  // each repeat reads the 64 elements that the repeat before it wrote
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Exp(t.a[64], t.a, 64, 3, UnaryRepeatParams(1, 1, 8, 8));  // fault: overlap_in_one_instruction
     }},
    {"ub_too_big",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 2, 98304);  // fault: ub_too_big
     }},
    {"too_many_buffers",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 9, 32);  // fault: too_many_buffers
     }},
    {"misaligned_copy",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopy(t.a[1], t.in, 64);  // fault: misaligned_copy
     }},
    {"copy_drops_tail",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopy(t.a, t.in, 100);  // fault: copy_drops_tail
     }},
    {"uninitialised_read",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopy(t.a, t.in, 248);
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);  // fault: uninitialised_read
       Sync<HardEvent::V_MTE3>();
       t.Store();
     }},
    {"gm_read_out_of_bounds",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopy(t.a, t.in[8], kElements);  // fault: gm_read_out_of_bounds
     }},
    {"gm_write_out_of_bounds",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 0.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       DataCopyPad(t.out[253], t.b, DataCopyExtParams(1, 16, 0, 0, 0));  // fault: gm_write_out_of_bounds
     }},
    {"global_tensor_too_small",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       t.in.SetGlobalBuffer((__gm__ float*)x, 100);
       DataCopy(t.a, t.in[40], 64);  // fault: global_tensor_too_small
     }},
    {"tbuf_too_small",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       t.buffer_a.Get<float>(kElements + 1);  // fault: tbuf_too_small
     }},
    {"tensor_out_of_bounds",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 0.0f, kElements + 1);  // fault: tensor_out_of_bounds
     }},
    {"repeat_256",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Abs(t.b, t.a, 64, 256, UnaryRepeatParams(1, 1, 0, 0));  // fault: repeat_256
     }},
    {"stride_256",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Add(t.b, t.a, t.a, 64, 2, BinaryRepeatParams(1, 1, 1, 8, 256, 8));  // fault: stride_256
     }},
    {"mask_65",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Abs(t.b, t.a, 65, 1, UnaryRepeatParams());  // fault: mask_65
     }},
    {"burst_4096",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       DataCopyPad(t.a, t.in, DataCopyExtParams(4096, 4, 0, 0, 0), DataCopyPadExtParams<float>());  // fault: burst_4096
     }},
    {"cast_mode",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Cast(t.b.ReinterpretCast<bfloat16_t>(), t.a, RoundMode::CAST_NONE, 64);  // fault: cast_mode
     }},
    {"cached_before_it_was_written",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       StoreTwice(t);
       (void)t.out.GetValue(8);  // fault: cached_before_it_was_written
     }},
    {"refreshed_behind_it",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       StoreTwice(t);
       DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(t.out[9]);
       (void)t.out.GetValue(8);  // fault: refreshed_behind_it
     }},
    {"legal_refreshed",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       StoreTwice(t);
       DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(t.out[16]);
       (void)t.out.GetValue(16);
       DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(t.out);
       (void)t.out.GetValue(8);
       DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(t.out);
       (void)t.out.GetValue(8);
       t.Load();
       Sync<HardEvent::MTE2_V>();
       Adds(t.b, t.a, 1.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       Sync<HardEvent::S_MTE3>();
       t.Store();
     }},
    {"overlapping_stores",
     [](GM_ADDR x, GM_ADDR y) {
       Bench t(x, y);
       Duplicate(t.b, 0.0f, kElements);
       Sync<HardEvent::V_MTE3>();
       DataCopy(t.out, t.b, 128);
       DataCopy(t.out[64], t.b, 128);  // fault: overlapping_stores
     }},
    {"foreign_tensor",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue, other;
       pipe.InitBuffer(queue, 1, 1024);
       pipe.InitBuffer(other, 1, 1024);
       LocalTensor<float> a = queue.AllocTensor<float>();
       other.EnQue(a);  // fault: foreign_tensor
     }},
    {"freed_twice",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 2, 1024);
       LocalTensor<float> a = queue.AllocTensor<float>();
       queue.FreeTensor(a);
       queue.FreeTensor(a);  // fault: freed_twice
     }},
    {"used_after_free",
     [](GM_ADDR x, GM_ADDR y) {
       TPipe pipe;
       PipeBench t(&pipe, x, y);
       Queue queue;
       pipe.InitBuffer(queue, 2, 1024);
       LocalTensor<float> a = queue.AllocTensor<float>();
       DataCopy(a, t.in, kElements);
       queue.EnQue(a);
       a = queue.DeQue<float>();
       queue.FreeTensor(a);
       Adds(t.b, a, 1.0f, kElements);  // fault: used_after_free
     }},
    {"dequeue_empty",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 2, 1024);
       queue.DeQue<float>();  // fault: dequeue_empty
     }},
    {"alloc_beyond_num",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 1, 1024);
       queue.AllocTensor<float>();
       queue.AllocTensor<float>();  // fault: alloc_beyond_num
     }},
    {"never_freed",
     [](GM_ADDR, GM_ADDR) {
       TPipe pipe;
       Queue queue;
       pipe.InitBuffer(queue, 1, 1024);
       queue.AllocTensor<float>();  // fault: never_freed
     }},
};

int main(int, char** argv) {
  alignas(ascend_emulator::ScalarCache::kLine) std::array<float, kElements> x, y{};
  for (uint32_t i = 0; i < kElements; ++i) x[i] = float(i);
  ascend_emulator::GlobalMemory gm;
  gm.add("x", x.data(), x.size() * sizeof(float), ascend_emulator::Use::input);
  gm.add("y", y.data(), y.size() * sizeof(float), ascend_emulator::Use::output);
  const auto& kernel = cases.at(argv[1]);
  print(ascend_emulator::launch(KERNEL_TYPE_AIV_ONLY, 1, parse_options(argv[2], argv[3]), gm,
                                [&] { kernel((GM_ADDR)x.data(), (GM_ADDR)y.data()); }));
  std::cout << "y";
  for (uint32_t i = 0; i < 4; ++i) std::cout << " " << y[i];
  std::cout << "\n";
}
