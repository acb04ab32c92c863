// The arithmetic of a reduction on a GPU, to the bit that of `sumac_hal::reduce`; its rules are stated there.
//
// `cuda::compile` has nvrtc compile it once for each element type and operator (SUMAC_DTYPE and SUMAC_OP, their wire numbers), and by a C++
// compiler (SUMAC_HOST) for all of them at once, so that a machine without a GPU can compare the bits. Invariants:
// - no fused multiply-add, no flush to zero, IEEE division: the intrinsics that say so, and the compiler's options;
// - a thread reads whatever it needs of an element before it writes the element, so `dst` may be `own` or `src`;
// - the hardware converts narrow floats as the code for the host does, except NaNs, which are replaced when they are stored;
// - what lies at multiples of 16 bytes is read and written 16 bytes at a time.

#ifdef SUMAC_HOST
#define INLINE inline
inline float add(float a, float b) { return a + b; }
inline double add(double a, double b) { return a + b; }
inline float mul(float a, float b) { return a * b; }
inline double mul(double a, double b) { return a * b; }
inline float quotient(float a, float b) { return a / b; }
inline double quotient(double a, double b) { return a / b; }
inline float float_of(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
inline unsigned bits_of(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
inline double float_of(unsigned long long bits) { double x; __builtin_memcpy(&x, &bits, 8); return x; }
inline unsigned long long bits_of(double x) { unsigned long long bits; __builtin_memcpy(&bits, &x, 8); return bits; }
#else
#define INLINE __device__ __forceinline__
INLINE float add(float a, float b) { return __fadd_rn(a, b); }
INLINE double add(double a, double b) { return __dadd_rn(a, b); }
INLINE float mul(float a, float b) { return __fmul_rn(a, b); }
INLINE double mul(double a, double b) { return __dmul_rn(a, b); }
INLINE float quotient(float a, float b) { return __fdiv_rn(a, b); }
INLINE double quotient(double a, double b) { return __ddiv_rn(a, b); }
INLINE float float_of(unsigned bits) { return __uint_as_float(bits); }
INLINE unsigned bits_of(float x) { return __float_as_uint(x); }
INLINE double float_of(unsigned long long bits) { return __longlong_as_double((long long)bits); }
INLINE unsigned long long bits_of(double x) { return (unsigned long long)__double_as_longlong(x); }
#endif
#define MEMBER static INLINE

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Wire numbers (sumac_hal::op).
enum { I8 = 1, U8, I16, U16, I32, U32, I64, U64, F16, BF16, F32, F64, E4M3, E5M2 };
enum { SUM = 1, PROD, MIN, MAX, AVG, PREMUL_SUM, BAND, BOR, BXOR, LAND, LOR, LXOR, MINLOC, MAXLOC };

// ---- floats narrower than their accumulator: exact to f32, to nearest even and canonical NaNs from f32 ----

const u32 F32_MAGNITUDE = 0x7fffffff, F32_INFINITY = 0x7f800000, F32_NAN = 0x7fc00000;
const u64 F64_NAN = 0x7ff8000000000000ull;

// 2^exponent as the bits of an f32.
INLINE constexpr u32 power_of_two(int exponent) { return (u32)(127 + exponent) << 23; }

template <int FRACTION_BITS, int BIAS> INLINE u32 widen_finite(u32 magnitude) {
    const u32 least_normal = power_of_two(1 - BIAS);
    u32 shifted = magnitude << (23 - FRACTION_BITS);
    u32 normal = shifted + ((u32)(127 - BIAS) << 23);
    u32 subnormal = bits_of(add(float_of(shifted + least_normal), -float_of(least_normal)));
    return shifted < (1u << 23) ? subnormal : normal;
}

template <int FRACTION_BITS, int BIAS> INLINE u32 narrow_magnitude(u32 magnitude, u32 most) {
    const int shift = 23 - FRACTION_BITS;
    const u32 align = power_of_two(1 - BIAS + 23 - FRACTION_BITS);
    u32 odd = (magnitude >> shift) & 1;
    u32 normal = (magnitude - ((u32)(127 - BIAS) << 23) + ((1u << (shift - 1)) - 1) + odd) >> shift;
    u32 subnormal = bits_of(add(float_of(magnitude), float_of(align))) - align;
    u32 finite = magnitude < power_of_two(1 - BIAS) ? subnormal : normal;
    return (i32)finite < (i32)most ? finite : most;
}

#ifdef SUMAC_HOST
INLINE float f16_to_f32(u16 bits) {
    u32 sign = ((u32)bits & 0x8000) << 16, shifted = ((u32)bits & 0x7fff) << 13;
    const u32 rebias = 112u << 23, least_normal = power_of_two(-14), infinity = 0x7c00u << 13;
    u32 normal = shifted + (shifted >= infinity ? 2 * rebias : rebias);
    u32 subnormal = bits_of(add(float_of(shifted + least_normal), -float_of(least_normal)));
    return float_of(sign | (shifted < (1u << 23) ? subnormal : normal));
}

INLINE u16 f32_to_f16(float value) {
    u32 bits = bits_of(value), magnitude = bits & F32_MAGNITUDE;
    u32 rounded = ((bits >> 16) & 0x8000) | narrow_magnitude<10, 15>(magnitude, 0x7c00);
    return (u16)(magnitude > F32_INFINITY ? 0x7e00 : rounded);
}
#else
INLINE float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

INLINE u16 f32_to_f16(float value) {
    u16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return (u16)((bits_of(value) & F32_MAGNITUDE) > F32_INFINITY ? 0x7e00 : rounded);
}
#endif

INLINE u16 f32_to_bf16(float value) {
    u32 bits = bits_of(value);
    u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (u16)((bits & F32_MAGNITUDE) > F32_INFINITY ? 0x7fc0 : rounded);
}

#if !defined(SUMAC_HOST) && __CUDA_ARCH__ >= 890
INLINE float e4m3_to_f32(u8 bits) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)bits));
    return f16_to_f32((u16)pair);
}

INLINE u8 f32_to_e4m3(float value) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    // The hardware stops at the largest value, 448; what lies beyond the midpoint behind it is no number.
    return (u8)((bits_of(value) & F32_MAGNITUDE) > 0x43e80000 ? 0x7f : pair);
}
#else
INLINE float e4m3_to_f32(u8 bits) {
    u32 magnitude = bits & 0x7f;
    return float_of(((u32)bits & 0x80) << 24 | (magnitude == 0x7f ? F32_NAN : widen_finite<3, 7>(magnitude)));
}

INLINE u8 f32_to_e4m3(float value) {
    u32 bits = bits_of(value), magnitude = narrow_magnitude<3, 7>(bits & F32_MAGNITUDE, 0x7f);
    return (u8)(magnitude == 0x7f ? 0x7f : ((bits >> 24) & 0x80) | magnitude);
}
#endif

INLINE u8 f32_to_e5m2(float value) {
    u32 bits = bits_of(value), magnitude = bits & F32_MAGNITUDE;
    u32 rounded = ((bits >> 24) & 0x80) | narrow_magnitude<2, 15>(magnitude, 0x7c);
    return (u8)(magnitude > F32_INFINITY ? 0x7e : rounded);
}

INLINE float canonical(float value) { return value != value ? float_of(F32_NAN) : value; }
INLINE double canonical(double value) { return value != value ? float_of(F64_NAN) : value; }

// ---- element types: how one becomes an accumulator, and how it is rounded back ----

template <class T> struct Exact {
    typedef T Element;
    typedef T Accumulator;
    MEMBER T widen(T x) { return x; }
    MEMBER T round(T x) { return x; }
};

template <class T> struct Float {
    typedef T Element;
    typedef T Accumulator;
    MEMBER T widen(T x) { return x; }
    MEMBER T round(T x) { return canonical(x); }
};

template <class T, float (*WIDEN)(T), T (*ROUND)(float)> struct Narrow {
    typedef T Element;
    typedef float Accumulator;
    MEMBER float widen(T x) { return WIDEN(x); }
    MEMBER T round(float x) { return ROUND(x); }
};

INLINE float bf16_to_f32(u16 bits) { return float_of((u32)bits << 16); }
INLINE float e5m2_to_f32(u8 bits) { return f16_to_f32((u16)(bits << 8)); }

template <int DTYPE> struct Type;
template <> struct Type<I8> : Exact<i8> {};
template <> struct Type<U8> : Exact<u8> {};
template <> struct Type<I16> : Exact<i16> {};
template <> struct Type<U16> : Exact<u16> {};
template <> struct Type<I32> : Exact<i32> {};
template <> struct Type<U32> : Exact<u32> {};
template <> struct Type<I64> : Exact<i64> {};
template <> struct Type<U64> : Exact<u64> {};
template <> struct Type<F32> : Float<float> {};
template <> struct Type<F64> : Float<double> {};
template <> struct Type<F16> : Narrow<u16, f16_to_f32, f32_to_f16> {};
template <> struct Type<BF16> : Narrow<u16, bf16_to_f32, f32_to_bf16> {};
template <> struct Type<E4M3> : Narrow<u8, e4m3_to_f32, f32_to_e4m3> {};
template <> struct Type<E5M2> : Narrow<u8, e5m2_to_f32, f32_to_e5m2> {};

// ---- pairs of a value and an index ----

template <class B> struct Pair {
    B value, index;
};

// Where the bits of a value lie among all of its type that are no NaN, and whether they are one.
INLINE i32 place(i32 x) { return x; }
INLINE i32 place(u32 x) { return (i32)(x ^ 0x80000000u); }
INLINE i64 place(i64 x) { return x; }
INLINE i64 place(u64 x) { return (i64)(x ^ 0x8000000000000000ull); }
INLINE i32 place(float x) { i32 bits = (i32)bits_of(x); return bits ^ (i32)((u32)(bits >> 31) >> 1); }
INLINE i64 place(double x) { i64 bits = (i64)bits_of(x); return bits ^ (i64)((u64)(bits >> 63) >> 1); }
template <class T> INLINE bool is_nan(T x) { return x != x; }

INLINE i32 least(i32) { return (i32)0x80000000u; }
INLINE i64 least(i64) { return (i64)0x8000000000000000ull; }

template <class T, class B> struct Located {
    typedef Pair<B> Element;
    typedef Pair<B> Accumulator;
    MEMBER Pair<B> widen(Pair<B> x) { return x; }
    MEMBER Pair<B> round(Pair<B> x) { return x; }
};

template <class T, class B> INLINE T of_bits(B bits) {
    if constexpr ((T)0.5 != (T)0) return float_of(bits);
    else return (T)bits;
}

template <class T, class B> struct LocatedFloat : Located<T, B> {
    MEMBER Pair<B> round(Pair<B> x) {
        x.value = bits_of(canonical(of_bits<T>(x.value)));
        return x;
    }
};

template <int DTYPE> struct PairType;
template <> struct PairType<I32> : Located<i32, u32> { typedef i32 Value; };
template <> struct PairType<U32> : Located<u32, u32> { typedef u32 Value; };
template <> struct PairType<I64> : Located<i64, u64> { typedef i64 Value; };
template <> struct PairType<U64> : Located<u64, u64> { typedef u64 Value; };
template <> struct PairType<F32> : LocatedFloat<float, u32> { typedef float Value; };
template <> struct PairType<F64> : LocatedFloat<double, u64> { typedef double Value; };

template <class T, bool GREATEST, class B> INLINE auto key(Pair<B> x) -> decltype(place(T())) {
    T value = of_bits<T>(x.value);
    auto at = place(value);
    return is_nan(value) ? least(at) : GREATEST ? ~at : at;
}

template <class T, bool GREATEST, class B> INLINE Pair<B> first(Pair<B> a, Pair<B> b) {
    auto x = key<T, GREATEST>(a), y = key<T, GREATEST>(b);
    return x < y || (x == y && a.index <= b.index) ? a : b;
}

// ---- operators ----

template <class A> struct Integer {
    MEMBER A sum(A a, A b) { return (A)((u64)a + (u64)b); }
    MEMBER A prod(A a, A b) { return (A)((u64)a * (u64)b); }
    MEMBER A min(A a, A b) { return a < b ? a : b; }
    MEMBER A max(A a, A b) { return a > b ? a : b; }
    // Wide enough for every value and every number of ranks: of those that make 0 of all 16-bit values, any will do.
    MEMBER A average(A x, u32 ranks) {
        if constexpr (sizeof(A) < 4) return (A)((i32)x / (i32)(ranks < 0x20000 ? ranks : 0x20000));
        else return (A)((i64)x / (i64)ranks);
    }
};

// IEEE 754-2019 minimum and maximum as hal's operators have them: asked both ways round.
template <class A> struct Real {
    MEMBER A sum(A a, A b) { return add(a, b); }
    MEMBER A prod(A a, A b) { return mul(a, b); }
    MEMBER A min(A a, A b) { return float_of(bits_of(a < b ? a : b) | bits_of(b < a ? b : a)); }
    MEMBER A max(A a, A b) {
        auto x = bits_of(a > b ? a : b), y = bits_of(b > a ? b : a);
        auto magnitude = ~(decltype(x))0 >> 1;
        return float_of((x & y) | ((x | y) & magnitude));
    }
    MEMBER A average(A x, u32 ranks) { return quotient(x, (A)ranks); }
};

template <class A> struct Arithmetic : Integer<A> {};
template <> struct Arithmetic<u64> : Integer<u64> {
    MEMBER u64 average(u64 x, u32 ranks) { return x / ranks; }
};
template <> struct Arithmetic<float> : Real<float> {};
template <> struct Arithmetic<double> : Real<double> {};

template <int OP, class A> struct Combine;
template <class A> struct Combine<SUM, A> { MEMBER A apply(A a, A b) { return Arithmetic<A>::sum(a, b); } };
template <class A> struct Combine<AVG, A> : Combine<SUM, A> {};
template <class A> struct Combine<PREMUL_SUM, A> : Combine<SUM, A> {};
template <class A> struct Combine<PROD, A> { MEMBER A apply(A a, A b) { return Arithmetic<A>::prod(a, b); } };
template <class A> struct Combine<MIN, A> { MEMBER A apply(A a, A b) { return Arithmetic<A>::min(a, b); } };
template <class A> struct Combine<MAX, A> { MEMBER A apply(A a, A b) { return Arithmetic<A>::max(a, b); } };
template <class A> struct Combine<BAND, A> { MEMBER A apply(A a, A b) { return (A)(a & b); } };
template <class A> struct Combine<BOR, A> { MEMBER A apply(A a, A b) { return (A)(a | b); } };
template <class A> struct Combine<LOR, A> : Combine<BOR, A> {};
template <class A> struct Combine<BXOR, A> { MEMBER A apply(A a, A b) { return (A)(a ^ b); } };
template <class A> struct Combine<LAND, A> { MEMBER A apply(A a, A b) { return (A)(a != 0 && b != 0); } };
template <class A> struct Combine<LXOR, A> { MEMBER A apply(A a, A b) { return (A)((a != 0) != (b != 0)); } };

// What happens to an accumulator right before it is rounded.
template <int OP, class A> INLINE A last(A value, u32 ranks) {
    if constexpr (OP == AVG) return Arithmetic<A>::average(value, ranks);
    else if constexpr (OP == LAND || OP == LOR || OP == LXOR) return (A)(value != 0);
    else return value;
}

// An operation: a type and an operator.
template <int DTYPE, int OP> struct Kernel : Type<DTYPE> {
    typedef typename Type<DTYPE>::Accumulator A;
    MEMBER A combine(A a, A b) { return Combine<OP, A>::apply(a, b); }
    MEMBER A finish(A value, u32 ranks) { return last<OP, A>(value, ranks); }
};
template <int DTYPE> struct Kernel<DTYPE, MINLOC> : PairType<DTYPE> {
    typedef typename PairType<DTYPE>::Accumulator A;
    MEMBER A combine(A a, A b) { return first<typename PairType<DTYPE>::Value, false>(a, b); }
    MEMBER A finish(A value, u32) { return value; }
};
template <int DTYPE> struct Kernel<DTYPE, MAXLOC> : PairType<DTYPE> {
    typedef typename PairType<DTYPE>::Accumulator A;
    MEMBER A combine(A a, A b) { return first<typename PairType<DTYPE>::Value, true>(a, b); }
    MEMBER A finish(A value, u32) { return value; }
};

// ---- the fused receive-reduce-copy ----

// What a landing does: `Launch` in launch.rs is the same.
struct Landing {
    const void *src, *own;
    void *dst;
    u64 count;
    // Elements before the first at which everything lies at a multiple of 16 bytes; `count` if there is none.
    u64 head;
    u32 flags, ranks;
};

enum { SRC_PARTIAL = 1, OWN = 2, OWN_PARTIAL = 4, FINISH = 8 };

struct alignas(16) Chunk {
    u32 words[4];
};

// Some elements of type T as chunks of 16 bytes.
template <class T, int N> union Elements {
    Chunk chunks[N * sizeof(T) / 16];
    T each[N];
};

template <class T, int N> INLINE void load(Elements<T, N> &to, const void *from, u64 vector) {
    const Chunk *chunks = (const Chunk *)from + vector * (N * sizeof(T) / 16);
#pragma unroll
    for (int i = 0; i < (int)(N * sizeof(T) / 16); i++) to.chunks[i] = chunks[i];
}

template <class T, int N> INLINE void store(void *to, u64 vector, const Elements<T, N> &from) {
    Chunk *chunks = (Chunk *)to + vector * (N * sizeof(T) / 16);
#pragma unroll
    for (int i = 0; i < (int)(N * sizeof(T) / 16); i++) chunks[i] = from.chunks[i];
}

// Tells the two forms of an element apart where they are one type.
template <class K, bool PARTIAL> struct Form {
    typedef typename K::Accumulator T;
    MEMBER typename K::A widen(T x) { return x; }
};
template <class K> struct Form<K, false> {
    typedef typename K::Element T;
    MEMBER typename K::A widen(T x) { return K::widen(x); }
};

template <class K, bool SRC, int OWN_FORM, bool DONE> struct Lander {
    typedef Form<K, SRC> S;
    typedef Form<K, OWN_FORM == 2> O;
    typedef Form<K, !DONE> D;
    // Elements whose shorter form is 16 bytes, and as many at a time as keep enough loads on their way.
    static const int WIDTH = 16 / sizeof(typename K::Element);
    static const int BYTES = WIDTH * sizeof(typename K::Accumulator);
    static const int UNROLL = BYTES >= 64 ? 1 : 64 / BYTES;

    MEMBER typename D::T one(typename S::T src, typename O::T own, u32 ranks) {
        typename K::A value = S::widen(src);
        if constexpr (OWN_FORM != 0) value = K::combine(O::widen(own), value);
        if constexpr (DONE) return K::round(K::finish(value, ranks));
        else return value;
    }

    MEMBER void scalar(const Landing &x, u64 at) {
        typename O::T own = typename O::T();
        if constexpr (OWN_FORM != 0) own = ((const typename O::T *)x.own)[at];
        ((typename D::T *)x.dst)[at] = one(((const typename S::T *)x.src)[at], own, x.ranks);
    }

    MEMBER void run(const Landing &x, u64 thread, u64 threads) {
        for (u64 at = thread; at < x.head; at += threads) scalar(x, at);
        u64 vectors = (x.count - x.head) / WIDTH;
        const typename S::T *src = (const typename S::T *)x.src + x.head;
        const typename O::T *own = (const typename O::T *)x.own + (OWN_FORM != 0 ? x.head : 0);
        typename D::T *dst = (typename D::T *)x.dst + x.head;
        for (u64 first = thread; first < vectors; first += threads * UNROLL) {
            Elements<typename S::T, WIDTH> s[UNROLL];
            Elements<typename O::T, WIDTH> o[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                u64 vector = first + i * threads;
                if (vector < vectors) {
                    load<typename S::T, WIDTH>(s[i], src, vector);
                    if constexpr (OWN_FORM != 0) load<typename O::T, WIDTH>(o[i], own, vector);
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                u64 vector = first + i * threads;
                if (vector < vectors) {
                    Elements<typename D::T, WIDTH> d;
#pragma unroll
                    for (int j = 0; j < WIDTH; j++) {
                        if constexpr (OWN_FORM != 0) d.each[j] = one(s[i].each[j], o[i].each[j], x.ranks);
                        else d.each[j] = one(s[i].each[j], typename O::T(), x.ranks);
                    }
                    store<typename D::T, WIDTH>(dst, vector, d);
                }
            }
        }
        for (u64 at = x.head + vectors * WIDTH + thread; at < x.count; at += threads) scalar(x, at);
    }
};

template <class K, bool SRC, int OWN_FORM> INLINE void land_done(const Landing &x, u64 thread, u64 threads) {
    if (x.flags & FINISH) Lander<K, SRC, OWN_FORM, true>::run(x, thread, threads);
    else Lander<K, SRC, OWN_FORM, false>::run(x, thread, threads);
}

template <class K, bool SRC> INLINE void land_own(const Landing &x, u64 thread, u64 threads) {
    const bool narrow = sizeof(typename K::Element) != sizeof(typename K::Accumulator);
    if (!(x.flags & OWN)) land_done<K, SRC, 0>(x, thread, threads);
    else if (narrow && (x.flags & OWN_PARTIAL)) land_done<K, SRC, narrow ? 2 : 1>(x, thread, threads);
    else land_done<K, SRC, 1>(x, thread, threads);
}

template <class K> INLINE void land(const Landing &x, u64 thread, u64 threads) {
    const bool narrow = sizeof(typename K::Element) != sizeof(typename K::Accumulator);
    if (narrow && (x.flags & SRC_PARTIAL)) land_own<K, narrow>(x, thread, threads);
    else land_own<K, false>(x, thread, threads);
}

// ---- a contribution to a premultiplied sum ----

// The same as `Scaling` in launch.rs.
struct Scaling {
    const void *src;
    void *dst;
    u64 count;
    double scalar;
    u64 integer;
};

template <class A> INLINE A times(A x, const Scaling &by) {
    if constexpr ((A)0.5 != (A)0) return mul(x, (A)by.scalar);
    else return (A)((u64)x * by.integer);
}

template <int DTYPE> INLINE void scale(const Scaling &x, u64 thread, u64 threads) {
    typedef Type<DTYPE> K;
    const typename K::Element *src = (const typename K::Element *)x.src;
    typename K::Element *dst = (typename K::Element *)x.dst;
    for (u64 at = thread; at < x.count; at += threads) {
        dst[at] = K::round(times<typename K::Accumulator>(K::widen(src[at]), x));
    }
}

#ifdef SUMAC_HOST

// As many threads as asked for, one after the other.
#define LAND(DTYPE, OP) \
    case DTYPE * 16 + OP: \
        for (u64 thread = 0; thread < threads; thread++) land<Kernel<DTYPE, OP>>(*x, thread, threads); \
        return 0;
#define NUMBERS(D) LAND(D, SUM) LAND(D, PROD) LAND(D, MIN) LAND(D, MAX) LAND(D, AVG) LAND(D, PREMUL_SUM)
#define BITS(D) LAND(D, BAND) LAND(D, BOR) LAND(D, BXOR) LAND(D, LAND) LAND(D, LOR) LAND(D, LXOR)
#define PLACES(D) LAND(D, MINLOC) LAND(D, MAXLOC)
#define SCALE(D) \
    case D: \
        for (u64 thread = 0; thread < threads; thread++) scale<D>(*x, thread, threads); \
        return 0;

// Return 0, or -1 for a pair that there is no kernel for.
extern "C" int sumac_host_land(u32 dtype, u32 op, const Landing *x, u64 threads) {
    switch (dtype * 16 + op) {
        NUMBERS(I8) NUMBERS(U8) NUMBERS(I16) NUMBERS(U16) NUMBERS(I32) NUMBERS(U32) NUMBERS(I64) NUMBERS(U64)
        NUMBERS(F16) NUMBERS(BF16) NUMBERS(F32) NUMBERS(F64) NUMBERS(E4M3) NUMBERS(E5M2)
        BITS(I8) BITS(U8) BITS(I16) BITS(U16) BITS(I32) BITS(U32) BITS(I64) BITS(U64)
        PLACES(I32) PLACES(U32) PLACES(I64) PLACES(U64) PLACES(F32) PLACES(F64)
    }
    return -1;
}

extern "C" int sumac_host_scale(u32 dtype, const Scaling *x, u64 threads) {
    switch (dtype) {
        SCALE(I8) SCALE(U8) SCALE(I16) SCALE(U16) SCALE(I32) SCALE(U32) SCALE(I64) SCALE(U64)
        SCALE(F16) SCALE(BF16) SCALE(F32) SCALE(F64) SCALE(E4M3) SCALE(E5M2)
    }
    return -1;
}

#else

// `stop` is a word that a host which gives up sets: what has not begun then does nothing.
extern "C" __global__ void __launch_bounds__(256) sumac_land(Landing x, const volatile u32 *stop) {
    if (*stop) return;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    land<Kernel<SUMAC_DTYPE, SUMAC_OP>>(x, thread, threads);
}

#if SUMAC_OP == 6
extern "C" __global__ void __launch_bounds__(256) sumac_scale(Scaling x, const volatile u32 *stop) {
    if (*stop) return;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    scale<SUMAC_DTYPE>(x, thread, threads);
}
#endif

#endif
