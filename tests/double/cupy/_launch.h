// Follows the kernels: runs one for every thread of a launch. Parameter types come from the
// kernel's own type.
extern "C" int double_run_block(void (*run)(void *, unsigned int), void *argument,
                                unsigned int threads, int backwards);

namespace double_of_cuda {

template <int... I>
struct Indices {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
    using type = Indices<I...>;
};

template <class T>
struct IsPointer {
    static constexpr int value = 0;
};
template <class T>
struct IsPointer<T *> {
    static constexpr int value = 1;
};

template <class... A>
int describe(void (*)(A...), int *sizes) {  // size, alignment, and whether it is a pointer
    const int facts[][3] = {
        {int(sizeof(A)), int(alignof(A)), IsPointer<A>::value}..., {0, 0, 0}};
    for (int i = 0; i < int(sizeof...(A)); ++i)
        for (int j = 0; j < 3; ++j) sizes[3 * i + j] = facts[i][j];
    return int(sizeof...(A));
}

static void *before_the_threads[5];

template <class... A, int... I>
void run_thread(void (*kernel)(A...), Indices<I...>, void **parameters, unsigned int number) {
    threadIdx.x = number % blockDim.x;
    threadIdx.y = number / blockDim.x % blockDim.y;
    threadIdx.z = number / blockDim.x / blockDim.y;
    kernel(*static_cast<A *>(parameters[I])...);
}

template <class... A>
struct Thread {
    void (*kernel)(A...);
    void **parameters;
    static void run(void *self, unsigned int number) {
        const Thread &thread = *static_cast<Thread *>(self);
        run_thread(thread.kernel, typename Count<sizeof...(A)>::type(), thread.parameters, number);
    }
};

// 0: all is well. 1: a misaligned access. 2: some threads ended while others were at a barrier.
template <class... A>
__attribute__((noinline)) int launch(void (*kernel)(A...), void **parameters,
                                     const unsigned int *sizes, int backwards) {
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    const unsigned long long grid = 1ull * gridDim.x * gridDim.y * gridDim.z;
    const unsigned int block = blockDim.x * blockDim.y * blockDim.z;
    Thread<A...> thread = {kernel, parameters};
    if (__builtin_setjmp(before_the_threads)) return 1;
    for (unsigned long long i = 0; i < grid; ++i) {
        const unsigned long long b = backwards ? grid - 1 - i : i;
        blockIdx.x = b % gridDim.x;
        blockIdx.y = b / gridDim.x % gridDim.y;
        blockIdx.z = b / gridDim.x / gridDim.y;
        if (double_run_block(&Thread<A...>::run, &thread, block, backwards)) return 2;
    }
    return 0;
}

}  // namespace double_of_cuda

// The compiler has put a call of this before every access that would be misaligned. A GPU stops at
// such an access, so the launch ends here.
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void *,
                                                                                      size_t) {
    __builtin_longjmp(double_of_cuda::before_the_threads, 1);
}

#define DOUBLE_KERNEL(name)                                                                  \
    extern "C" int double_describe_##name(int *sizes) {                                      \
        return double_of_cuda::describe(&name, sizes);                                       \
    }                                                                                        \
    extern "C" int double_launch_##name(void **parameters, const unsigned int *sizes,        \
                                        int backwards) {                                     \
        return double_of_cuda::launch(&name, parameters, sizes, backwards);                  \
    }
