// One compilation of the CPU backend without its kernels, which are in inst/: reading the headers of the standard
// library takes most of the time of each of these sources.
#include "cpu/caches.cpp"
#include "cpu/dispatch.cpp"
#include "cpu/isa.cpp"
#include "cpu/tile_size.cpp"
