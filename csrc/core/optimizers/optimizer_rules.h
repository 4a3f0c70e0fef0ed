// All rules. See optimizer_kernel.h on inclusion.
//
// A rule has the name of its op, its moments, the fields of a row of its hyper-parameters, and
// update<V>(values, gradient, coefficients), which turns the master weights and moments of one
// vector into the new ones.
#pragma once

#include "adam_rule.h"
#include "lamb_rule.h"
#include "lion_rule.h"
