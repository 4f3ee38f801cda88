// The parts of the extension module, and what they share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "kernels.h"

namespace octavo {

template <typename T>
using Array1 = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Array2 = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// By name, or the best for "auto". Raises ValueError for one that cannot run here.
const Kernels& kernels_for(const std::string& isa);

void bind_plan(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_sampler(nanobind::module_& m);
void bind_roofline(nanobind::module_& m);

}  // namespace octavo
