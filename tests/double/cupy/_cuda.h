// Enough of CUDA C++ to compile plain kernels for the host: the threads of a block run one after the
// other, each up to its next barrier (see _threads.cpp). No header of the host is included, as NVRTC
// has none either.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#define DOUBLE_VECTORS(type, name, alignment)                              \
    struct alignas(sizeof(type)) name##1 { type x; };                      \
    struct alignas(alignment(sizeof(type), 2)) name##2 { type x, y; };     \
    struct name##3 { type x, y, z; };                                      \
    struct alignas(alignment(sizeof(type), 4)) name##4 { type x, y, z, w; }; \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
#define DOUBLE_ALIGNMENT(size, count) ((size) * (count) > 16 ? 16 : (size) * (count))

DOUBLE_VECTORS(signed char, char, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(unsigned char, uchar, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(short, short, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(unsigned short, ushort, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(int, int, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(unsigned int, uint, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(long long, longlong, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(unsigned long long, ulonglong, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(float, float, DOUBLE_ALIGNMENT)
DOUBLE_VECTORS(double, double, DOUBLE_ALIGNMENT)

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1)
        : x(x), y(y), z(z) {}
};

// One thread of the process runs all kernels, so these need not be thread_local.
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

extern "C" void double_barrier();

static inline void __syncthreads() {
    const uint3 mine = threadIdx;
    double_barrier();
    threadIdx = mine;
}

template <class T>
static inline T min(T a, T b) {
    return b < a ? b : a;
}

template <class T>
static inline T max(T a, T b) {
    return a < b ? b : a;
}

template <class T>
static inline T __ldg(const T *pointer) {
    return *pointer;
}

static inline unsigned int __umulhi(unsigned int a, unsigned int b) {
    return static_cast<unsigned int>((static_cast<unsigned long long>(a) * b) >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
