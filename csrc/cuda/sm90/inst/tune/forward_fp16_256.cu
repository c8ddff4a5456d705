#include "../../forward.cuh"

template void flashattn_ext::sm90::forward<__half, 256, 1>(const flashattn_ext::AttnParams&);
template void flashattn_ext::sm90::forward<__half, 256, 2>(const flashattn_ext::AttnParams&);
