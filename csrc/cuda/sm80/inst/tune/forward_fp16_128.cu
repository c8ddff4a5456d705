#include "../../forward.cuh"

template void flashattn_ext::sm80::forward<__half, 128, 1>(const flashattn_ext::AttnParams&);
template void flashattn_ext::sm80::forward<__half, 128, 2>(const flashattn_ext::AttnParams&);
