// Headers of plain members of a tar archive in memory. Whatever is not plain is left to the caller, who says what it is.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#define EXPORTED __attribute__((visibility("default")))

namespace {

constexpr int64_t BLOCK = 512;

// An octal number of a header; -1 for anything but digits between blanks and zeros.
int64_t octal(const uint8_t *field, int length) {
  int at = 0;
  while (at < length && field[at] == ' ') ++at;
  if (at == length || field[at] < '0' || field[at] > '7') return -1;
  int64_t number = 0;
  for (; at < length && field[at] >= '0' && field[at] <= '7'; ++at) number = 8 * number + (field[at] - '0');
  while (at < length && field[at] == ' ') ++at;
  return at == length || field[at] == 0 ? number : -1;
}

bool has_right_checksum(const uint8_t *header) {
  int64_t sum = 8 * ' ';  // which stand for the checksum's own field
  for (int i = 0; i < BLOCK; ++i) sum += i < 148 || i >= 156 ? header[i] : 0;
  return octal(header + 148, 8) == sum;
}

// Whether the records of a PAX header, "length keyword=value newline", tell nothing but times and owners: webdataset
// writes the time of each member so.
bool changes_nothing(const uint8_t *records, int64_t size) {
  static const char *const KNOWN[] = {"mtime=", "atime=", "ctime=", "uid=", "gid=", "uname=", "gname="};
  for (int64_t at = 0; at < size;) {
    int64_t length = 0, key = at;
    for (; key < size && key < at + 4 && records[key] >= '0' && records[key] <= '9'; ++key)
      length = 10 * length + (records[key] - '0');
    if (key >= size || records[key] != ' ' || ++key >= at + length || at + length > size || records[at + length - 1] != '\n')
      return false;
    const auto begins = [&](const char *word) {
      const auto letters = static_cast<int64_t>(std::strlen(word));
      return key + letters < at + length && std::memcmp(records + key, word, static_cast<size_t>(letters)) == 0;
    };
    if (!std::any_of(std::begin(KNOWN), std::end(KNOWN), begins)) return false;
    at += length;
  }
  return true;
}

}  // namespace

extern "C" {

// Goes up whenever a function takes other arguments; see `embq/core/native.py`.
EXPORTED int embq_interface() { return 4; }

// Members of a tar archive from byte *at on, while they are plain files with plain headers, `most` of them at most: of
// each where its header, its content and the byte behind that are; and their names, each with a zero behind it, which
// take `used` bytes of 101 for each. *at becomes the first byte that is not among them.
EXPORTED int64_t embq_members(const uint8_t *data, int64_t size, int64_t *at, int64_t most, int64_t *found, char *names,
                              int64_t *used) {
  int64_t count = 0;
  char *next = names;
  for (; count < most; ++count) {
    int64_t here = *at;
    if (here < 0 || here > size) break;
    if (here + BLOCK <= size && data[here + 156] == 'x') {
      const int64_t records = octal(data + here + 124, 12);
      if (records < 0 || records > BLOCK || here + 2 * BLOCK > size || !has_right_checksum(data + here) ||
          !changes_nothing(data + here + BLOCK, records))
        break;
      here += records > 0 ? 2 * BLOCK : BLOCK;
    }
    if (here + BLOCK > size) break;
    const uint8_t *const header = data + here;
    const int64_t length = octal(header + 124, 12), start = here + BLOCK;
    const auto *const name_end = static_cast<const uint8_t *>(std::memchr(header, 0, 100));
    const int64_t name = name_end == nullptr ? 100 : name_end - header;
    if ((header[156] != '0' && header[156] != 0) || header[345] != 0 || name == 0 || header[name - 1] == '/' || length < 0 ||
        length > size - start || !has_right_checksum(header))
      break;
    const int64_t end = start + (length + BLOCK - 1) / BLOCK * BLOCK;
    if (end > size) break;
    const int64_t row[] = {here, start, start + length};
    std::copy(row, row + 3, found + 3 * count);
    next = std::copy(header, header + name, next);
    *next++ = 0;
    *at = end;
  }
  *used = next - names;
  return count;
}

}  // extern "C"
