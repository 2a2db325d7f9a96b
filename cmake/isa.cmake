# One row per instruction set: cpumoe_isa(<name> <processor regex, or ANY> [<compiler flag>...]).
# The order and the names are those of core/machine/isa.inc. Files of a row are called <name>.cc and
# see the name as CPUMOE_NS, the namespace of headers that several rows include. A row whose
# processor does not match or whose flags the compiler refuses is left out of the build.
include(CheckCXXCompilerFlag)

set(CPUMOE_ISAS "")
set(CPUMOE_ISAS_LEFT_OUT "")

function(cpumoe_isa name processor)
  set(usable TRUE)
  if(NOT processor STREQUAL "ANY" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "${processor}")
    set(usable FALSE)
  endif()
  if(usable AND ARGN)
    string(REPLACE ";" " " flags "${ARGN}")
    check_cxx_compiler_flag("${flags}" CPUMOE_COMPILES_${name})
    set(usable ${CPUMOE_COMPILES_${name}})
  endif()
  if(usable)
    set(CPUMOE_ISAS ${CPUMOE_ISAS} ${name} PARENT_SCOPE)
    set(CPUMOE_FLAGS_${name} "${ARGN}" PARENT_SCOPE)
  else()
    set(CPUMOE_ISAS_LEFT_OUT ${CPUMOE_ISAS_LEFT_OUT} ${name} PARENT_SCOPE)
  endif()
endfunction()

cpumoe_isa(scalar ANY)
cpumoe_isa(avx2 "^(x86_64|AMD64|amd64)$" -mavx2 -mfma -mf16c)
cpumoe_isa(avx512 "^(x86_64|AMD64|amd64)$" -mavx2 -mfma -mf16c
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx512vnni)
cpumoe_isa(avx512_bf16 "^(x86_64|AMD64|amd64)$" -mavx2 -mfma -mf16c
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mavx512vnni -mavx512bf16
  -mavx512vbmi)
