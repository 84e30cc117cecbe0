# Sets `variable`, a cache entry, to the folder of XLA's headers: that of the jaxlib in the project's virtual environment
# or of python3. It is looked for again until it is found; -DSUPEROFFLOAD_XLA_INCLUDE= (empty) builds without it.
function(find_xla_include variable)
  if(DEFINED ${variable} AND (NOT ${variable} OR EXISTS "${${variable}}/xla/ffi/api/ffi.h"))
    return()
  endif()
  foreach(python "$ENV{SUPEROFFLOAD_VENV}/bin/python" "${PROJECT_SOURCE_DIR}/.venv/bin/python" python3)
    execute_process(COMMAND "${python}" -c "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('jaxlib').origin))"
      OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND EXISTS "${jaxlib}/include/xla/ffi/api/ffi.h")
      set(${variable} "${jaxlib}/include" CACHE PATH "Folder of XLA's headers; empty: build without JAX inside jit" FORCE)
      message(STATUS "XLA's headers: ${${variable}}")
      return()
    endif()
  endforeach()
  message(STATUS "XLA's headers: none, so JAX cannot hand gradients over inside jit (install jax before cmake)")
endfunction()
