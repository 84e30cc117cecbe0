# What "cmake --install" and the .deb (cpack) hold beside programs and libraries.
if(SUPEROFFLOAD_SANITIZE)
  return()  # nobody installs those
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# systemd.
set(SUPEROFFLOAD_UNIT_DIR lib/systemd/system)
install(FILES systemd/superoffloadd@.service systemd/superoffloadd@.socket systemd/sys-fs-resctrl.mount
  DESTINATION ${SUPEROFFLOAD_UNIT_DIR})
install(FILES systemd/superoffloadd.sysusers DESTINATION lib/sysusers.d RENAME superoffloadd.conf)
install(FILES systemd/superoffloadd.tmpfiles DESTINATION lib/tmpfiles.d RENAME superoffloadd.conf)
install(FILES systemd/superoffloadd.default DESTINATION /etc/default RENAME superoffloadd)
install(FILES systemd/superoffloadd.textproto DESTINATION /etc/superoffloadd)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
# In folders as in the tree, so that their links to each other lead somewhere.
set(package client/python/superoffload)
foreach(folder client client/ctl client/include/superoffload ${package}/_core ${package}/jax ${package}/torch
    ${package}/torch/gpu ${package}/torch/ranks ${package}/torch/state deploy)
  install(FILES ${folder}/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/${folder})
endforeach()

install(PROGRAMS deploy/slurm/prolog.sh deploy/slurm/epilog.sh DESTINATION share/superoffload)
install(FILES deploy/prometheus/rules.yml deploy/prometheus/scrape.yml deploy/grafana/dashboard.json
  DESTINATION share/superoffload)

# For C and C++ users: headers, libraries, CMake and pkg-config files.
install(DIRECTORY client/include/ DESTINATION include FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(DIRECTORY proto/superoffload DESTINATION include FILES_MATCHING PATTERN "*.h")
install(DIRECTORY proto/superoffload DESTINATION share/superoffload/proto FILES_MATCHING PATTERN "*.proto")
install(DIRECTORY ${CMAKE_BINARY_DIR}/proto/superoffload DESTINATION include FILES_MATCHING PATTERN "*.pb.h")
install(TARGETS superoffload_client superoffload_client_cpp superoffload_proto superoffload_grpc superoffload_contract
  EXPORT superoffload LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT superoffload NAMESPACE superoffload:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/superoffload)
configure_package_config_file(deploy/superoffload-config.cmake.in ${CMAKE_BINARY_DIR}/superoffload-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/superoffload)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/superoffload-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/superoffload-config.cmake ${CMAKE_BINARY_DIR}/superoffload-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/superoffload)
configure_file(deploy/superoffload.pc.in ${CMAKE_BINARY_DIR}/superoffload.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/superoffload.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The Python package as a wheel, for "pip install /usr/share/superoffload/*.whl". Needs $SUPEROFFLOAD_PYTHON with
# setuptools, wheel and grpcio-tools.
set(SUPEROFFLOAD_PYTHON "" CACHE FILEPATH "Python that builds the wheel; empty for none")
if(SUPEROFFLOAD_PYTHON)
  # From a copy: building leaves files beside the sources.
  set(wheel_source ${CMAKE_BINARY_DIR}/wheel-source)
  add_custom_target(wheel ALL
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${wheel_source}
    COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_SOURCE_DIR}/client/python ${wheel_source}/client/python
    COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_SOURCE_DIR}/client/examples/recipes
            ${wheel_source}/client/examples/recipes
    COMMAND ${CMAKE_COMMAND} -E copy_directory ${CMAKE_SOURCE_DIR}/proto ${wheel_source}/proto
    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/CMakeLists.txt ${CMAKE_SOURCE_DIR}/README.md ${wheel_source}
    COMMAND ${SUPEROFFLOAD_PYTHON} -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir
            ${CMAKE_BINARY_DIR}/wheel ${wheel_source}/client/python
    VERBATIM)
  install(DIRECTORY ${CMAKE_BINARY_DIR}/wheel/ DESTINATION share/superoffload FILES_MATCHING PATTERN "*.whl")
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME superoffloadd)
set(CPACK_PACKAGE_VENDOR "The superoffloadd authors")
set(CPACK_PACKAGE_CONTACT "The superoffloadd authors <superoffloadd@users.noreply.github.com>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "Owns optimizer state in the memory of a Superchip's CPU and runs optimizer steps for trainers.\n\
 Daemon, planner, superoffloadctl, client libraries and headers, the Python package as a wheel, systemd units.")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libgrpc++-dev, libabsl-dev, prometheus")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  ${CMAKE_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_SOURCE_DIR}/deploy/debian/prerm
  ${CMAKE_SOURCE_DIR}/deploy/debian/postrm ${CMAKE_SOURCE_DIR}/deploy/debian/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
if(CMAKE_CROSSCOMPILING)
  # The sysroot's libraries are not known to this machine's dpkg.
  set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE arm64)
  set(CPACK_DEBIAN_PACKAGE_DEPENDS
    "libc6 (>= 2.36), libgrpc++1.51, libprotobuf32, libabsl20220623, libhwloc15, libnuma1, libsystemd0, zlib1g, libprometheus-cpp-pull1.0, libprometheus-cpp-core1.0, libbenchmark1debian")
  set(CPACK_STRIP_FILES OFF)
else()
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
endif()
include(CPack)
