// ops.packing: codes of 2 to 8 bits in planes.
#include "common.h"

// Adds the plane of p bits from bit `shift` on to the codes of a share, or sets it if shift is 0.
inlined void unpack_plane(const uint8_t *plane, struct share s, int p, int shift, uint8_t *codes) {
    const int mask = (1 << p) - 1;
    for (int q = 0; q < p; q++)
        for (int i = 0; i < 8 / p; i++) {
            const uint8_t *from = plane + q * s.strip + s.first;
            uint8_t *to = codes + (q + i * p) * s.width;
            for (int64_t j = 0; j < s.width; j++) {
                uint8_t part = (uint8_t)((from[j] >> (i * p) & mask) << shift);
                to[j] = shift ? to[j] | part : part;
            }
        }
}

inlined void pack_plane(const uint8_t *codes, struct share s, int p, int shift, uint8_t *plane) {
    const int mask = (1 << p) - 1;
    for (int q = 0; q < p; q++) {
        uint8_t *to = plane + q * s.strip + s.first;
        for (int64_t j = 0; j < s.width; j++) {
            int byte = 0;
            for (int i = 0; i < 8 / p; i++)
                byte |= (codes[(q + i * p) * s.width + j] >> shift & mask) << (i * p);
            to[j] = (uint8_t)byte;
        }
    }
}

void unpack(const uint8_t *line, struct share s, int bits, uint8_t *codes) {
    switch (bits) {
    case 8: unpack_plane(line, s, 8, 0, codes); break;
    case 4: unpack_plane(line, s, 4, 0, codes); break;
    case 2: unpack_plane(line, s, 2, 0, codes); break;
    case 6:
        unpack_plane(line, s, 4, 0, codes);
        unpack_plane(line + 4 * s.strip, s, 2, 4, codes);
        break;
    case 5:
        unpack_plane(line, s, 4, 0, codes);
        unpack_plane(line + 4 * s.strip, s, 1, 4, codes);
        break;
    case 3:
        unpack_plane(line, s, 2, 0, codes);
        unpack_plane(line + 2 * s.strip, s, 1, 2, codes);
        break;
    }
}

void pack(const uint8_t *codes, struct share s, int bits, uint8_t *line) {
    switch (bits) {
    case 8: pack_plane(codes, s, 8, 0, line); break;
    case 4: pack_plane(codes, s, 4, 0, line); break;
    case 2: pack_plane(codes, s, 2, 0, line); break;
    case 6:
        pack_plane(codes, s, 4, 0, line);
        pack_plane(codes, s, 2, 4, line + 4 * s.strip);
        break;
    case 5:
        pack_plane(codes, s, 4, 0, line);
        pack_plane(codes, s, 1, 4, line + 4 * s.strip);
        break;
    case 3:
        pack_plane(codes, s, 2, 0, line);
        pack_plane(codes, s, 1, 2, line + 2 * s.strip);
        break;
    }
}
