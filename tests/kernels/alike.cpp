// Prints a hash of what each kernel makes that all replicas must compute alike, of fixed messages of many magnitudes.
// Its argument is a file with the basis of each chunk, as `basis.dct_matrix` has it.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "topk_dct.cpp"
#include "bits.cpp"

using std::vector;

static float number(int64_t i) {  // both signs, no function that may round
  return float((uint64_t(i) * 2654435761u) % 1048573 - 524286.0) / 65536 / float(int64_t(1) << (i * 7 % 23));
}

template <typename T> static void print(const std::string &name, const vector<T> &values) {
  uint64_t hash = 14695981039346656037u;
  for (T value : values) {
    if (value != value) value = T(123);  // which NaN it is, is the processor's own affair
    uint8_t bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof value);
    for (uint8_t byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  }
  std::printf("%s %016llx\n", name.c_str(), (unsigned long long)hash);
}

static void decoded(const float *basis, int chunk, int messages, int k, int width, bool few, bool nonzero, bool step) {
  const int64_t numel[] = {chunk * 37 - 5, 1, chunk * 3};
  const int64_t rows = 37 + 1 + 3;
  vector<vector<float>> values, weights;
  vector<vector<uint8_t>> packed;
  vector<const float *> value_at;
  vector<const uint8_t *> packed_at;
  const int64_t bytes = width ? (rows * k * width + 7) / 8 : (rows * chunk + 7) / 8;
  for (int m = 0; m < messages; ++m) {
    vector<float> mine(rows * k);
    vector<int64_t> indices(rows * k);
    for (int64_t i = 0; i < rows * k; ++i) {
      mine[i] = i % 11 == 3 ? 0 : i % 97 == 5 ? 1e-41f : i == 40 * m + 60 ? 1.0f / 0 : number(i + 1000 * m);
      indices[i] = i % k * (chunk / k) + (i / k + 3 * m) % (chunk / k);
    }
    packed.emplace_back(bytes + 64);
    if (width) detonation_pack(indices.data(), 1, rows * k, 0, width, packed[m].data(), bytes);
    else detonation_mark(indices.data(), 1, rows, k, chunk, 0, packed[m].data());
    mine.resize(rows * k + 64);
    values.push_back(mine);
  }
  for (int m = 0; m < messages; ++m) value_at.push_back(values[m].data()), packed_at.push_back(packed[m].data());
  vector<float *> targets;
  for (int64_t count : numel) {
    weights.emplace_back(count);
    for (int64_t i = 0; i < count; ++i) weights.back()[i] = number(i + 77);
  }
  for (auto &each : weights) targets.push_back(each.data());
  const float shrink[] = {0.999f, 1, 0.97f}, lr[] = {3e-4f, 1e-3f, 0.1f};
  detonation_decode(targets.data(), numel, rows, chunk, value_at.data(), nullptr, packed_at.data(), bytes, messages,
                    k, width, few, nonzero, float(1.0 / messages), basis, step ? shrink : nullptr, step ? lr : nullptr);
  vector<float> all;
  for (auto &each : weights) all.insert(all.end(), each.begin(), each.end());
  char name[99];
  std::snprintf(name, sizeof name, "decode-%d-%d-%d-%d-%d-%d-%d", chunk, messages, k, width, few, nonzero, step);
  print(name, all);
}

int main(int, char **arguments) {
  std::FILE *file = std::fopen(arguments[1], "rb");
  for (int chunk : {16, 32, 64, 128, 256}) {
    vector<float> basis(chunk * chunk);
    if (std::fread(basis.data(), 4, basis.size(), file) != basis.size()) return 1;
    int bits = 0;
    while (1 << bits < chunk) ++bits;
    for (int messages : {1, 2, 3, 8})
      for (int k : {1, 4, chunk / 4})
        for (int width : {bits, 0})
          for (int kind = 0; kind < 6; ++kind) {  // few, all, or the mean of nonzero ones; to write, or to step by
            const bool few = kind % 3 == 0;
            if (!few || messages * k <= (chunk / 2 < 64 ? chunk / 2 : 64))
              decoded(basis.data(), chunk, messages, k, width, few, kind % 3 == 2, kind > 2);
          }
    vector<float> coefficients(45 * chunk), out(45 * chunk);
    for (size_t i = 0; i < coefficients.size(); ++i) coefficients[i] = i % 101 == 7 ? 1e30f : number(int64_t(i));
    detonation_product(coefficients.data(), 45, chunk, basis.data(), out.data());
    print("product-" + std::to_string(chunk), out);
  }
  vector<float> weights(10007), directions(10007);
  for (int i = 0; i < 10007; ++i) weights[i] = number(i), directions[i] = i % 5 ? number(i + 3) : -0.0f;
  detonation_sign_step(weights.data(), directions.data(), 10007, 0.99991f, 3e-4f);
  print("sign_step", weights);
  for (bool negative_zeros : {false, true}) {
    vector<uint8_t> codes(313 + 1), statistics(6);
    SignWriter writer(codes.data(), statistics.data(), negative_zeros);
    for (int i = 0; i < 2500; i += 50) writer.add(directions.data() + i, 50);
    writer.finish();
    print("codes", codes), print("statistics", statistics);
    const float magnitudes[] = {0.25f, 3, 1e-4f};
    vector<float> read(2500 + LANES);
    signed_values(codes.data(), magnitudes, 0, 2500, read.data());
    read.resize(2500), print("signs", read);
  }
  vector<uint8_t> message(50001);
  for (int i = 0; i < 50001; ++i) message[i] = uint8_t(i * 2654435761u >> 13);
  vector<int64_t> sum(1), faults(2);
  detonation_checksums(message.data(), 1, 50001, 50001, 24, sum.data());
  print("checksum", sum);
  for (int width : {3, 6, 11}) {
    vector<int64_t> numbers(8 * 50001 / width / 8 * 8);
    const int64_t count = int64_t(numbers.size());
    detonation_unpack(message.data(), 1, 50001, 50001, count, 0, width, numbers.data());
    print("unpack-" + std::to_string(width), numbers);
    vector<uint8_t> few(numbers.size()), packed(50001);
    if (width > 8) continue;
    detonation_unpack(message.data(), 1, 50001, 50001, count, 1, width, few.data());
    detonation_pack(few.data(), 1, count, 1, width, packed.data(), 50001);
    print("bytes-" + std::to_string(width), few), print("packed-" + std::to_string(width), packed);
  }
  vector<uint8_t> marked(2 * 40 * 5);
  detonation_marked(message.data(), 2, 333, 40, 5, 64, 1, marked.data());
  print("marked", marked);
  detonation_check_indices(message.data(), 1, 50001, 100, 4, 60, 6, faults.data());
  detonation_check_indices(message.data(), 1, 50001, 100, 32, 64, 0, faults.data() + 1);
  print("checks", faults);
}
