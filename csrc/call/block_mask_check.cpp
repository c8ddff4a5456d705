// The checks of the tensors of a BlockMask, and what does not go together with one.
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/util/Exception.h>

#include <limits>
#include <string>
#include <vector>

#include "call/validate.h"
#include "rules/mask.h"
#include "tensors/dtype_name.h"

namespace flashattn_ext {
namespace {

void refuse_other_calls(const AttnCall& c) {
  constexpr char kIsNot[] = " is not implemented with a BlockMask; ";
  TORCH_CHECK_NOT_IMPLEMENTED(!c.is_varlen(), "mask: a packed call (varlen_forward)", kIsNot,
                              "use a Mask of packed keys, or padded sequences in forward()");
  TORCH_CHECK_NOT_IMPLEMENTED(!c.origin || c.origin->size() == 2, "mask: an origin of four numbers or five", kIsNot,
                              "use a Mask, or pass the part of mask.dense() as a bias, with -inf for hidden keys");
  TORCH_CHECK_NOT_IMPLEMENTED(!c.invariant, "mask: invariant=True", kIsNot, "use a Mask, or leave invariant out");
  TORCH_CHECK_VALUE(!c.mask_intervals, "mask: expected one mask, got the tensors of a Mask and of a BlockMask");
}

// Throws unless a list of one head has ascending starts from 0 to at most its number of entries, and for each start
// entries that ascend below `blocks`, with bits below `partial`.
void check_list(const MaskBlock* entries, const int32_t* starts, int64_t lists, int64_t blocks, int64_t capacity,
                int64_t partial) {
  bool is_list = starts[0] == 0 && starts[lists] <= capacity;
  for (int64_t n = 0; is_list && n < lists; ++n) {
    is_list = starts[n] <= starts[n + 1];
    int64_t least = 0;
    for (int64_t i = starts[n]; is_list && i < starts[n + 1]; ++i) {
      is_list = entries[i].block >= least && entries[i].block < blocks && entries[i].bits >= kWholeBlock;
      least = entries[i].block + 1;
      TORCH_CHECK_VALUE(entries[i].bits < partial, "mask: expected at most max_partial=", partial,
                        " partly visible blocks, got a BlockMask with more; make it with a larger max_partial, or "
                        "without");
    }
  }
  TORCH_CHECK_VALUE(is_list, "mask: expected the lists that BlockMask makes (rules/mask.h), got other values");
}

// Throws unless both lists of every head are lists, and of the same blocks: a backward would wait forever for a block
// that only one of them has.
void check_lists(const at::Tensor& lists, int64_t partial, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = mask_blocks(seqlen_q), columns = mask_blocks(seqlen_k);
  const int64_t capacity = (lists.size(2) - mask_start_words(seqlen_q, seqlen_k)) / 4;
  const at::Tensor all = lists.contiguous();
  std::vector<int32_t> next(static_cast<size_t>(columns));
  for (int64_t head = 0; head < all.size(0) * all.size(1); ++head) {
    const int32_t* const words = all.const_data_ptr<int32_t>() + head * all.size(2);
    const auto* const by_rows = reinterpret_cast<const MaskBlock*>(words);
    const MaskBlock* const by_keys = by_rows + capacity;
    const int32_t *const row_starts = words + 4 * capacity, *const key_starts = row_starts + rows + 1;
    check_list(by_rows, row_starts, rows, columns, capacity, partial);
    check_list(by_keys, key_starts, columns, rows, capacity, partial);
    std::copy(key_starts, key_starts + columns, next.begin());
    bool same = row_starts[rows] == key_starts[columns];
    for (int64_t row = 0; same && row < rows; ++row) {
      for (int64_t i = row_starts[row]; same && i < row_starts[row + 1]; ++i) {
        const int64_t at = next[by_rows[i].block]++;
        same = at < key_starts[by_rows[i].block + 1] && by_keys[at].block == row && by_keys[at].bits == by_rows[i].bits;
      }
    }
    TORCH_CHECK_VALUE(same, "mask: expected the same blocks in both lists of a BlockMask, got others in list ", head);
  }
}

}  // namespace

void check_block_mask(const AttnCall& c) {
  refuse_other_calls(c);
  const at::Tensor &lists = *c.mask_lists, &bits = *c.mask_bits;
  for (const at::Tensor* t : {&lists, &bits}) {
    TORCH_CHECK_TYPE(t->scalar_type() == at::kInt, "mask: expected lists and bits of dtype int32, got ",
                     dtype_name(t->scalar_type()));
    check_device("mask", *t, c.q);
  }
  const c10::SymInt heads_q = c.q.sym_size(c.head_axis()), heads_k = c.k.sym_size(c.head_axis());
  const c10::SymInt seqlen_q = c.q.sym_size(c.row_dim()), seqlen_k = c.k.sym_size(c.row_dim());
  const auto blocks_of = [](const c10::SymInt& length) { return (length + (kMaskBlock - 1)) / kMaskBlock; };
  const c10::SymInt starts = (blocks_of(seqlen_q) + blocks_of(seqlen_k) + 5) / 4 * 4;  // mask_start_words
  const auto fits = [&](int64_t dim, const c10::SymInt& size) {
    return lists.sym_size(dim).sym_eq(1).sym_or(lists.sym_size(dim).sym_eq(size));
  };
  TORCH_CHECK_VALUE(lists.dim() == 3 && holds(fits(0, c.batch())) && holds(fits(1, heads_q).sym_or(fits(1, heads_k))) &&
                        holds(lists.sym_size(2).sym_ge(starts)) && holds(((lists.sym_size(2) - starts) % 4).sym_eq(0)),
                    "mask: expected the lists of a BlockMask of [", c.batch(), " or 1, 1 or ", heads_k, " or ", heads_q,
                    ", ", seqlen_q, ", ", seqlen_k, "] (batch, heads, rows, keys), got lists of shape ",
                    lists.sym_sizes());
  // Starts are int32, and so are the places of entries in kernels.
  constexpr int64_t kMostEntries = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(holds(lists.sym_size(2).sym_le(starts + 4 * kMostEntries)),
                    "mask: expected a BlockMask with room for at most ", kMostEntries,
                    " blocks in a head, got room for ", (lists.sym_size(2) - starts) / 4,
                    "; from_function and from_flex make room for visible blocks alone");
  TORCH_CHECK_VALUE(
      bits.dim() == 3 && holds(bits.sym_size(1).sym_eq(kMaskBlock)) && holds(bits.sym_size(2).sym_eq(kMaskBlockWords)),
      "mask: expected bits of shape [blocks, ", kMaskBlock, ", ", kMaskBlockWords, "], got ", bits.sym_sizes());
  if (!lists.is_cpu() || at::isTensorSubclassLike(lists)) return;  // no values, or they need a synchronisation
  check_lists(lists, bits.size(0), seqlen_q.expect_int(), seqlen_k.expect_int());
}

}  // namespace flashattn_ext
