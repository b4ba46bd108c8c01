int main() {  // every array ends where its memory does
  if (!specdec_enable()) return 0;
  for (size_t rows : {1, 3, 8, 17, 33}) for (size_t depth : {1, 31, 64, 97}) for (size_t columns : {1, 15, 64, 70}) {
    std::vector<uint16_t> x(rows * depth, 0x3f80), weights(columns * depth, 0x3f80);
    std::vector<int8_t> small(columns * depth, 1);
    std::vector<float> scale(columns, 1.0f), out(rows * columns);
    specdec_product(x.data(), weights.data(), nullptr, out.data(), rows, depth, columns);
    specdec_product(x.data(), small.data(), scale.data(), out.data(), rows, depth, columns);
    for (float one : out) if (one != depth) return 1;
  }
  for (size_t width : {1, 5, 11}) for (size_t slots : {11, 40, 97}) for (size_t dim : {8, 33, 64}) {
    const size_t sizes[] = {2, width, 6, 2, slots, dim};
    std::vector<uint16_t> query(2 * width * 6 * dim), keys(4 * slots * dim, 0x3f80), values(4 * slots * dim, 0x3f80);
    std::vector<char> mask(2 * width * slots, 1);
    for (size_t i = 0; i < mask.size(); i += 3) mask[i] = slots == 40 ? 0 : 1;
    std::vector<float> out(query.size()), biases(12 * width * slots, 2.0f);
    const float* added = slots == 97 ? biases.data() : nullptr;
    specdec_attend(query.data(), keys.data(), values.data(), (const bool*)mask.data(), added, out.data(), sizes, 5.0f);
    for (float one : out) if (!(one > 0.98f && one < 1.02f)) return 2;
  }
  return 0;
}
