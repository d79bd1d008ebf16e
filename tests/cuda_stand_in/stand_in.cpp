// An accelerator for tests: four devices with CUDA's streams, events and allocator, but no hardware.
//
// It is a PrivateUse1 backend, so autograd gives each device its real thread and its real stream
// semantics. Kernels are the CPU's and run at once, in the order in which the host launches them.
// What a GPU would have run in parallel is told by vector clocks: each stream counts its work, and
// knows how much of every other stream's work it comes after. A read or write of memory that does
// not come after an earlier write (or, for writes, an earlier read) is a race.
//
// Source: the semantics are those of c10/cuda/CUDACachingAllocator.cpp, ATen/native/cuda/Copy.cu
// and torch/csrc/cuda/nccl.cpp in torch 2.13.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {

using at::Tensor;
using torch::jit::IValue;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreamsEach = 33; // the default one, and a pool of 32 that is handed out in turn
constexpr size_t kBlockBytes = 512; // sizes are rounded up to a multiple, as CUDA's allocator does

// ---- Streams: what comes after what ----

struct Clock : std::array<uint32_t, kDevices * kStreamsEach> {
  void join(const Clock& other) {
    for (size_t i = 0; i < size(); ++i)
      (*this)[i] = std::max((*this)[i], other[i]);
  }
};

struct Access { // of a range of bytes, by a piece of work
  size_t begin, end;
  int stream;
  uint32_t tick;
  bool writes;
  std::string name;
};

struct Block {
  void* memory;
  size_t bytes;
  int stream; // the one that was current when it was allocated
  std::set<int> recorded; // others that use it, by record_stream
  std::vector<Access> accesses; // those that a later one may race with
};

struct Use {
  Block* block;
  size_t begin, end;
  bool writes;
};

struct Work { // in the record that a clock is run on
  std::string name;
  std::vector<int> streams; // several for a collective
  std::vector<int> targets; // devices that it transfers to; -1 is the host
  double amount; // floating point operations, or bytes
  Clock after; // what it comes after, itself included
};

struct Machine {
  std::mutex mutex;
  std::array<Clock, kDevices * kStreamsEach> streams{};
  Clock host{}; // one for all threads of the host
  std::vector<std::string> races;
  std::deque<Work> record;
  std::atomic<bool> is_recording = false;
  int64_t num_waits = 0; // times that the host waited for a device
  std::array<int, kDevices> next_stream{};
  std::map<std::pair<int, size_t>, std::vector<Block*>> free; // by stream and size
  std::vector<std::pair<Block*, std::vector<std::pair<int, uint32_t>>>> in_use; // freed, but recorded
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats{};
  std::array<int64_t, kDevices> limits{}; // bytes that can be allocated; 0 for any
  std::string failure; // what is said where there is no memory; empty for torch's own error
  std::array<at::Generator, kDevices> generators;
  bool is_initialized = false;
};

Machine& machine() {
  static auto* const it = new Machine; // never destroyed: tensors may outlive everything
  return *it;
}

using Lock = std::lock_guard<std::mutex>;

thread_local int current_device = 0;
thread_local std::array<int, kDevices> current_streams{};

c10::Device device_of(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

int stream_of(int device) {
  return device * kStreamsEach + current_streams[device];
}

int stream_of(const c10::Stream& stream) {
  return stream.device_index() * kStreamsEach + static_cast<int>(stream.id());
}

std::string name_of(int stream) {
  return c10::str("device ", stream / kStreamsEach, " stream ", stream % kStreamsEach);
}

void wait_on_host(int stream) {
  machine().host.join(machine().streams[stream]);
  ++machine().num_waits;
}

bool races_with(const Access& earlier, const Use& use, const Clock& clock) {
  return (earlier.writes || use.writes) && earlier.begin < use.end && use.begin < earlier.end &&
      clock[earlier.stream] < earlier.tick;
}

void check(const std::string& name, int stream, const Use& use) {
  auto& m = machine();
  const Clock& clock = m.streams[stream];
  auto& accesses = use.block->accesses;
  for (const Access& earlier : accesses)
    if (races_with(earlier, use, clock))
      m.races.push_back(c10::str(
          name, use.writes ? " writes" : " reads", " on ", name_of(stream), " what ", earlier.name,
          earlier.writes ? " writes" : " reads", " on ", name_of(earlier.stream)));
  const Access now{use.begin, use.end, stream, clock[stream], use.writes, name};
  // Who is ordered after this one is ordered after those that it takes the place of.
  accesses.erase(
      std::remove_if(accesses.begin(), accesses.end(), [&](const Access& earlier) {
        return now.begin <= earlier.begin && earlier.end <= now.end &&
            clock[earlier.stream] >= earlier.tick && (now.writes || !earlier.writes);
      }), accesses.end());
  accesses.push_back(now);
}

// Puts work into streams, after what they and the host have waited for. `root` tells which stream
// of a collective the others wait for (broadcast), or which one waits for them (reduce).
void launch(
    const std::string& name, const std::vector<int>& streams, const std::vector<std::vector<Use>>& uses,
    double amount = 0, std::vector<int> targets = {}, int root = -1, bool reduces = false) {
  auto& m = machine();
  Work work{name, streams, std::move(targets), amount, m.host};
  for (int stream : streams) {
    m.streams[stream].join(m.host);
    ++m.streams[stream][stream];
    work.after.join(m.streams[stream]);
  }
  if (root >= 0)
    for (int stream : streams)
      reduces ? m.streams[streams[root]].join(m.streams[stream])
              : m.streams[stream].join(m.streams[streams[root]]);
  for (size_t i = 0; i < streams.size(); ++i)
    for (const Use& use : uses[i])
      check(name, streams[i], use);
  if (m.is_recording)
    m.record.push_back(std::move(work));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return device_of(current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(0 <= device.index() && device.index() < kDevices, "invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const Lock lock(machine().mutex);
    const auto index = device.has_index() ? device.index() : current_device;
    const int id = 1 + machine().next_stream[index]++ % (kStreamsEach - 1);
    return c10::Stream(c10::Stream::UNSAFE, device_of(index), id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    return is_done(machine().streams[stream_of(stream)]);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    wait_on_host(stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const Lock lock(machine().mutex);
    for (int id = 0; id < kStreamsEach; ++id)
      machine().host.join(machine().streams[device * kStreamsEach + id]);
    ++machine().num_waits;
  }

  // An event is what the stream had done when it was recorded.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const Lock lock(machine().mutex);
    if (!*event)
      *event = new Clock;
    *static_cast<Clock*>(*event) = machine().streams[stream_of(stream)];
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    if (event)
      machine().streams[stream_of(stream)].join(*static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    const Lock lock(machine().mutex);
    return !event || is_done(*static_cast<Clock*>(event));
  }
  void synchronizeEvent(void* event) const override {
    const Lock lock(machine().mutex);
    if (event)
      machine().host.join(*static_cast<Clock*>(event));
    ++machine().num_waits;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    auto* block = static_cast<Block*>(data.get_context());
    if (block && block->stream != stream_of(stream))
      block->recorded.insert(stream_of(stream));
  }

 private:
  // Nothing is known to be done before the host has waited for it.
  static bool is_done(Clock clock) {
    clock.join(machine().host);
    return clock == machine().host;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory ----

// A freed block goes to the next request of its size on its stream, so who still uses it on another
// stream must have recorded that, or the block's stream must have waited for it.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& m = machine();
    const Lock lock(m.mutex);
    const c10::Device device = device_of(current_device);
    m.is_initialized = true;
    if (bytes == 0)
      return {nullptr, device};
    bytes = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    auto& allocated = stat(m.stats[current_device].allocated_bytes);
    if (const auto limit = m.limits[current_device]; limit && allocated.current + int64_t(bytes) > limit) {
      TORCH_CHECK(m.failure.empty(), m.failure);
      ++m.stats[current_device].num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory. Tried to allocate ", bytes, " bytes on ", device);
    }
    reclaim();
    auto& waiting = m.free[{stream_of(current_device), bytes}];
    Block* block;
    if (waiting.empty()) {
      block = new Block{std::aligned_alloc(kBlockBytes, bytes), bytes, stream_of(current_device)};
      spoil(block);
      stat(m.stats[current_device].reserved_bytes).increase(bytes);
    } else {
      block = waiting.back();
      waiting.pop_back();
    }
    allocated.increase(bytes);
    return {block->memory, block, &Allocator::free, device};
  }

  static void free(void* context) {
    auto& m = machine();
    const Lock lock(m.mutex);
    auto* block = static_cast<Block*>(context);
    const int stream = block->stream;
    stat(m.stats[stream / kStreamsEach].allocated_bytes).decrease(block->bytes);
    m.streams[stream].join(m.host);
    for (const Access& earlier : block->accesses)
      if (!block->recorded.count(earlier.stream) && m.streams[stream][earlier.stream] < earlier.tick)
        m.races.push_back(c10::str(
            "memory of ", name_of(stream), " is freed while ", earlier.name, " uses it on ",
            name_of(earlier.stream)));
    std::vector<std::pair<int, uint32_t>> uses;
    for (int other : block->recorded)
      uses.emplace_back(other, m.streams[other][other]);
    block->recorded.clear();
    block->accesses.clear();
    spoil(block);
    m.in_use.emplace_back(block, std::move(uses));
  }

  static void spoil(Block* block) { std::memset(block->memory, 0xff, block->bytes); } // NaN

  // The host asks for the events of recorded streams when it allocates, as CUDA's allocator does.
  static void reclaim() {
    auto& m = machine();
    auto& in_use = m.in_use;
    in_use.erase(
        std::remove_if(in_use.begin(), in_use.end(), [&](const auto& entry) {
          for (const auto& [stream, tick] : entry.second)
            if (m.host[stream] < tick)
              return false;
          m.free[{entry.first->stream, entry.first->bytes}].push_back(entry.first);
          return true;
        }), in_use.end());
  }

  static c10::CachingAllocator::Stat& stat(c10::CachingAllocator::StatArray& stats) {
    return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return machine().is_initialized; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { Guard().recordDataPtrOnStream(data, stream); }
  void emptyCache(c10::MempoolId_t) override {
    auto& m = machine();
    const Lock lock(m.mutex);
    reclaim();
    for (auto& entry : m.free)
      for (Block* block : entry.second) {
        stat(m.stats[block->stream / kStreamsEach].reserved_bytes).decrease(block->bytes);
        std::free(block->memory);
        delete block;
      }
    m.free.clear();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    return machine().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    TORCH_CHECK(machine().is_initialized, "Invalid device argument ", int(device), ": did you call init?");
    stat(machine().stats[device].allocated_bytes).reset_peak();
    stat(machine().stats[device].reserved_bytes).reset_peak();
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_of(device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_of(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(bytes);
    if (bytes && storage.nbytes())
      std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- Operators ----

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

Use use_of(const Tensor& tensor, bool writes) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (!block || tensor.numel() == 0)
    return {nullptr, 0, 0, writes};
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i)
    last += (tensor.size(i) - 1) * tensor.stride(i);
  const size_t itemsize = tensor.itemsize();
  return {block, tensor.storage_offset() * itemsize, (last + 1) * itemsize, writes};
}

// Tensors of the CPU that share the memory of ours, for one call of the CPU's kernel.
class OnCpu {
 public:
  std::optional<at::Device> device;
  std::vector<Use> uses;

  Tensor alias(const Tensor& tensor, bool writes, bool may_be_on_cpu = false) {
    if (!is_ours(tensor)) {
      if (tensor.defined() && tensor.dim() && !may_be_on_cpu)
        check_device(tensor);
      return tensor;
    }
    check_device(tensor);
    device = tensor.device();
    add(tensor, writes);
    c10::Storage storage = storage_for(tensor.storage());
    Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    result._set_conj(tensor.is_conj());
    result._set_neg(tensor.is_neg());
    aliases_.emplace_back(tensor, result, writes);
    return result;
  }

  // Returns what a tensor of the CPU's kernel is here: an argument, a view of one, or a new one.
  Tensor original(const Tensor& result) {
    if (!result.defined())
      return result;
    for (const auto& [tensor, alias, writes] : aliases_)
      if (alias.is_same(result))
        return tensor;
    for (const auto& [tensor, alias, writes] : aliases_)
      if (alias.is_alias_of(result)) {
        Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(
            result.sizes(), result.strides(), result.storage_offset());
        view._set_conj(result.is_conj());
        view._set_neg(result.is_neg());
        return view;
      }
    Tensor copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(*device));
    alias(copy, true).copy_(result);
    return copy;
  }

  // Arguments that the kernel has resized are here, too.
  void resize_originals() {
    for (size_t i = 0; i < aliases_.size(); ++i) {
      const auto [tensor, result, writes] = aliases_[i];
      if (writes && !result.sizes().equals(tensor.sizes())) {
        tensor.resize_(result.sizes());
        storages_.clear();
        alias(tensor, true).copy_(result);
      }
    }
  }

 private:
  void check_device(const Tensor& tensor) const {
    TORCH_CHECK(
        !device || *device == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device,
        " and ", tensor.device(), "!");
  }

  void add(const Tensor& tensor, bool writes) {
    const Use use = use_of(tensor, writes);
    if (use.block)
      uses.push_back(use);
  }

  c10::Storage storage_for(const c10::Storage& ours) {
    for (const auto& [known, cpus] : storages_)
      if (known.unsafeGetStorageImpl() == ours.unsafeGetStorageImpl())
        return cpus;
    c10::Storage cpus(
        c10::Storage::use_byte_size_t(), ours.nbytes(), c10::DataPtr(ours.mutable_data(), at::kCPU),
        c10::GetAllocator(at::kCPU), /*resizable=*/true);
    storages_.emplace_back(ours, cpus);
    return cpus;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<std::tuple<Tensor, Tensor, bool>> aliases_;
};

// Replaces each tensor in an argument or result.
template <class Function>
IValue map_tensors(const IValue& value, const Function& function) {
  if (value.isTensor())
    return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector())
      mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      mapped.push_back(tensor ? std::make_optional(function(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

std::string name_of(const c10::FunctionSchema& schema) {
  return schema.name().substr(schema.name().find("::") + 2);
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The number of floating point operations of a matrix product; 0 for all else, which costs nothing.
double num_operations(const std::string& name, at::ArrayRef<IValue> args) {
  const bool adds = name == "addmm" || name == "baddbmm";
  if (!adds && name != "mm" && name != "bmm")
    return 0;
  const Tensor &left = args[adds].toTensor(), &right = args[adds + 1].toTensor();
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const bool is_view = !schema.returns().empty() && schema.returns()[0].alias_info() &&
      !schema.returns()[0].alias_info()->isWrite();
  const std::string name = name_of(schema);
  const bool indexes = name.find("index") != std::string::npos; // indices may be on the CPU
  OnCpu cpu;
  for (size_t i = first; i < stack->size(); ++i) {
    const auto& argument = schema.arguments()[i - first];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    IValue& value = (*stack)[i];
    value = map_tensors(value, [&](const Tensor& t) { return cpu.alias(t, writes, indexes); });
    if (value.isDevice() && value.toDevice().type() == kType) {
      cpu.device = value.toDevice();
      value = at::Device(at::kCPU);
    }
  }
  if (!cpu.device || !cpu.device->has_index())
    cpu.device = device_of(current_device);
  const c10::DeviceGuard guard(*cpu.device);
  const int stream = stream_of(cpu.device->index());
  for (size_t i = first; i < stack->size(); ++i)
    if ((*stack)[i].isNone() && takes_generator(schema.arguments()[i - first]))
      (*stack)[i] = machine().generators[cpu.device->index()];
  if (machine().is_recording && !is_view) // host threads launch at one pace, however few the cores
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  const double amount = num_operations(name, at::ArrayRef<IValue>(*stack).slice(first));
  if (is_view)
    cpu.uses.clear();

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  cpu.resize_originals();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const Tensor& t) { return cpu.original(t); });
  if (is_view)
    return;
  const Lock lock(machine().mutex);
  launch(name, {stream}, {cpu.uses}, amount);
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape))
    wait_on_host(stream);
}

// Between devices, the source's stream copies, and both streams wait for each other. The host waits
// where it is one of the two and non_blocking was not said.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source))
    return self;
  const bool from_us = is_ours(source), to_us = is_ours(self);
  OnCpu from, to;
  const Tensor to_cpu = to.alias(self, true, true);
  const Tensor from_cpu = from.alias(source.expand(self.sizes()), false, true);
  const int source_device = from_us ? source.device().index() : self.device().index();
  const int stream = stream_of(source_device);
  to_cpu.copy_(from_cpu);

  std::vector<Use> uses = from.uses;
  uses.insert(uses.end(), to.uses.begin(), to.uses.end());
  const double bytes = static_cast<double>(self.nbytes());
  const int target = to_us ? self.device().index() : -1;
  const bool is_between = from_us && to_us && target != source_device;
  auto& m = machine();
  const Lock lock(m.mutex);
  if (is_between) {
    m.streams[stream].join(m.streams[stream_of(target)]);
    launch("copy", {stream}, {uses}, bytes, {target});
    m.streams[stream_of(target)].join(m.streams[stream]);
  } else if (from_us && to_us) {
    launch("copy_", {stream}, {uses});
  } else {
    launch(to_us ? "upload" : "download", {stream}, {uses}, bytes, {target});
    if (!non_blocking)
      wait_on_host(stream);
  }
  return self;
}

Tensor _copy_from(const Tensor& source, const Tensor& self, bool non_blocking) {
  Tensor result = self;
  return copy_(result, source, non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  OnCpu cpu;
  const at::Scalar value = cpu.alias(self, false).item();
  const Lock lock(machine().mutex);
  launch("_local_scalar_dense", {stream_of(self.device().index())}, {cpu.uses});
  wait_on_host(stream_of(self.device().index()));
  return value;
}

void record_stream(Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

Tensor& set_(Tensor& self) {
  return self.set_(at::empty({0}, self.options()));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train)
    return {input, at::ones_like(input, at::kBool)};
  const Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0. : 1 / (1 - p)), mask};
}

const c10::OperatorHandle& handle_of(const char* name) {
  static std::map<std::string, c10::OperatorHandle> handles;
  static std::mutex mutex;
  const Lock lock(mutex);
  return handles.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  torch::jit::Stack stack;
  torch::jit::push(stack, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  fallback(handle_of("aten::convolution"), &stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  torch::jit::Stack stack;
  const std::vector<int64_t> bias_size{gradient.size(1)};
  torch::jit::push(
      stack, gradient, input, weight, bias_size, stride, padding, dilation, transposed, output_padding, groups,
      mask);
  fallback(handle_of("aten::convolution_backward"), &stack);
  const auto result = [&](int i) { return stack[i].isTensor() ? stack[i].toTensor() : Tensor(); };
  return {result(0), result(1), result(2)};
}

// The CPU has no such kernels; differentiable by themselves.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor all = input_gates + hidden_gates;
  if (input_bias && input_bias->defined())
    all = all + *input_bias + *hidden_bias;
  const auto gates = all.chunk(4, 1);
  const Tensor cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, at::empty({0}, cx.options())};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  const auto of_input = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto of_hidden = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid();
  const Tensor keep = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  return {candidate + keep * (hx - candidate), at::empty({0}, hx.options())};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", _copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // Without, these call their variants with out=, which warn that they resize it.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("resize_", at::native::resize_);
  m.impl("set_", set_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// What NCCL does on the current streams: outputs[i] becomes inputs[root], or outputs[root] the sum.
void collective(const std::string& name, std::vector<Tensor> inputs, std::vector<Tensor> outputs, int root) {
  const bool reduces = name == "reduce";
  std::vector<int> streams, targets;
  std::vector<std::vector<Use>> uses;
  std::vector<Tensor> from, to;
  for (size_t i = 0; i < inputs.size(); ++i) {
    OnCpu cpu;
    streams.push_back(stream_of(inputs[i].device().index()));
    if (static_cast<int>(i) != root || reduces)
      targets.push_back(inputs[i].device().index());
    from.push_back(cpu.alias(inputs[i], false));
    const bool receives = reduces == (static_cast<int>(i) == root);
    to.push_back(receives ? cpu.alias(outputs[i], true) : Tensor());
    uses.push_back(cpu.uses);
  }
  if (reduces)
    to[root].copy_(at::stack(from).sum(0, false, from[0].scalar_type()));
  else
    for (Tensor& tensor : to)
      if (tensor.defined())
        tensor.copy_(from[root]);
  const Lock lock(machine().mutex);
  launch(name, streams, uses, static_cast<double>(inputs[root].nbytes()), targets, root, reduces);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  const py::gil_scoped_release no_gil;
  auto& m = machine();
  for (auto& generator : m.generators)
    generator = at::detail::createCPUGenerator();
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  const py::gil_scoped_acquire gil;
  module.attr("STREAMS_EACH") = kStreamsEach;
  module.def("collective", &collective, py::call_guard<py::gil_scoped_release>());
  module.def("is_initialized", [] { return machine().is_initialized; });
  module.def("num_waits", [] { return machine().num_waits; });
  module.def("manual_seed", [](int device, uint64_t seed) { machine().generators[device].set_current_seed(seed); });
  module.def("get_rng_state", [](int device) { return machine().generators[device].get_state(); });
  module.def("set_rng_state", [](int device, const Tensor& state) { machine().generators[device].set_state(state); });
  module.def("reset", [] { // as after a call of synchronize for each device
    const Lock lock(machine().mutex);
    for (const Clock& clock : machine().streams)
      machine().host.join(clock);
    machine().races.clear();
    machine().record.clear();
    machine().num_waits = 0;
  });
  module.def("races", [] {
    const Lock lock(machine().mutex);
    return std::exchange(machine().races, {});
  });
  module.def("set_limit", [](int device, int64_t bytes, const std::string& failure) {
    const Lock lock(machine().mutex);
    machine().limits[device] = bytes;
    machine().failure = failure;
  });
  module.def("set_recording", [](bool on) { machine().is_recording = on; });
  module.def("take_record", [] { // a list of (name, [(stream, tick)], targets, amount, {stream: tick})
    std::deque<Work> record;
    {
      const Lock lock(machine().mutex);
      record = std::exchange(machine().record, {});
    } // Python's collector may free tensors below
    py::list result;
    for (const Work& work : record) {
      py::list own;
      py::dict after;
      for (size_t i = 0; i < work.after.size(); ++i)
        if (work.after[i])
          after[py::int_(i)] = work.after[i];
      for (int stream : work.streams)
        own.append(py::make_tuple(stream, work.after[stream]));
      result.append(py::make_tuple(work.name, own, work.targets, work.amount, after));
    }
    return result;
  });
}
