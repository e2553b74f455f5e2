// ops.packing: codes of 2 to 8 bits in planes.
#include "common.h"

// Eight bytes with `mask`, of at most 7 bits, in each.
inlined uint64_t in_each_byte(int mask) { return (uint64_t)mask * 0x0101010101010101u; }

// Writes the p bits from `by` on of bytes to the bits from `shift` on of codes; other bits of codes
// are kept if shift is not 0.
inlined void spread_bits(const uint8_t *from, int64_t count, int p, int by, int shift,
                         uint8_t *to) {
    const uint64_t mask = in_each_byte((1 << p) - 1);
    int64_t j = 0;
    if (p == 8) {
        memcpy(to, from, (size_t)count);
        return;
    }
    for (; j + 8 <= count; j += 8) {
        uint64_t word, before = 0;
        memcpy(&word, from + j, 8);
        if (shift) memcpy(&before, to + j, 8);
        word = before | (word >> by & mask) << shift;
        memcpy(to + j, &word, 8);
    }
    for (; j < count; j++) {
        uint8_t part = (uint8_t)((from[j] >> by & (uint8_t)mask) << shift);
        to[j] = shift ? to[j] | part : part;
    }
}

inlined void unpack_plane(const uint8_t *plane, int64_t strip, int p, int shift, int64_t from,
                          int64_t count, uint8_t *codes) {
    unsigned number = (unsigned)(from / strip), of_p = (unsigned)p;
    for (int64_t at = from - number * strip; count > 0; at = 0, number++) {
        const int64_t length = least(count, strip - at);
        const uint8_t *bytes = plane + number % of_p * strip + at;
        spread_bits(bytes, length, p, (int)(number / of_p * of_p), shift, codes);
        count -= length, codes += length;
    }
}

inlined void pack_plane(const uint8_t *codes, int64_t apart, struct share s, int p, int shift,
                        uint8_t *plane) {
    const uint64_t mask = in_each_byte((1 << p) - 1);
    for (int q = 0; q < p; q++) {
        uint8_t *to = plane + q * s.strip + s.first;
        for (int64_t j = 0; j < s.width; j += 8) {
            uint64_t word = 0;
            for (int i = 0; i < 8 / p; i++) {
                uint64_t part;
                memcpy(&part, codes + (q + i * p) * apart + j, 8);
                word |= p == 8 ? part : (part >> shift & mask) << (i * p);
            }
            memcpy(to + j, &word, 8);
        }
    }
}

void unpack_codes(const uint8_t *line, int64_t strip, int bits, int64_t from, int64_t count,
                  uint8_t *codes) {
    switch (bits) {
    case 8: unpack_plane(line, strip, 8, 0, from, count, codes); break;
    case 4: unpack_plane(line, strip, 4, 0, from, count, codes); break;
    case 2: unpack_plane(line, strip, 2, 0, from, count, codes); break;
    case 6:
        unpack_plane(line, strip, 4, 0, from, count, codes);
        unpack_plane(line + 4 * strip, strip, 2, 4, from, count, codes);
        break;
    case 5:
        unpack_plane(line, strip, 4, 0, from, count, codes);
        unpack_plane(line + 4 * strip, strip, 1, 4, from, count, codes);
        break;
    case 3:
        unpack_plane(line, strip, 2, 0, from, count, codes);
        unpack_plane(line + 2 * strip, strip, 1, 2, from, count, codes);
        break;
    }
}

void pack(const uint8_t *codes, int64_t apart, struct share s, int bits, uint8_t *line) {
    switch (bits) {
    case 8: pack_plane(codes, apart, s, 8, 0, line); break;
    case 4: pack_plane(codes, apart, s, 4, 0, line); break;
    case 2: pack_plane(codes, apart, s, 2, 0, line); break;
    case 6:
        pack_plane(codes, apart, s, 4, 0, line);
        pack_plane(codes, apart, s, 2, 4, line + 4 * s.strip);
        break;
    case 5:
        pack_plane(codes, apart, s, 4, 0, line);
        pack_plane(codes, apart, s, 1, 4, line + 4 * s.strip);
        break;
    case 3:
        pack_plane(codes, apart, s, 2, 0, line);
        pack_plane(codes, apart, s, 1, 2, line + 2 * s.strip);
        break;
    }
}

void pack_line(const uint8_t *codes, int64_t count, int bits, uint8_t *line, int threads) {
    const int64_t strip = cdiv(count, GROUP) * (GROUP / STRIPS);
    const int64_t width = WIDEST * 8, shares = cdiv(strip, width);
#pragma omp parallel for num_threads(threads)
    for (int64_t task = 0; task < shares; task++) {
        const int64_t first = task * width;
        const struct share s = {strip, first, least(width, strip - first), STRIPS, 0};
        pack(codes + first, strip, s, bits, line);
    }
}
