"""Machine code as cuobjdump prints it, shortened: a kernel with an inner loop in an outer one."""

from __future__ import annotations

import pytest

DUMP = """
Fatbin elf code:
================
arch = {architecture}

	code for {architecture}
	.target	{architecture}

		Function : kernel
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;               /* 0x00000a00ff017624 */
                                                                                         /* 0x000fe400078e00ff */
        /*0010*/                   LDG.E R9, [R2.64] ;                                   /* 0x0 */
        /*0020*/                   MOV R0, 0x40 ;                                        /* 0x0 */
        /*0030*/                   CALL.REL.NOINC {called} ;                             /* 0x0 */
        /*0040*/                   LDG.E{width} R4, [R2.64] ;                            /* 0x0 */
        /*0050*/              @!P1 BRA 0x70 ;                                            /* 0x0 */
        /*0060*/                   FADD R4, R4, R5 ;                                     /* 0x0 */
        /*0070*/                   STG.E.128 [R6.64], R4 ;                               /* 0x0 */
        /*0080*/                   LDG.E.128 R8, [R2.64+0x10] ;                          /* 0x0 */
        /*0090*/               @P0 BRA 0x40 ;                                            /* 0x0 */
        /*00a0*/                   STG.E.U8 [R6.64], R4 ;                                /* 0x0 */
        /*00b0*/               @P2 BRA 0x20 ;                                            /* 0x0 */
        /*00c0*/                   EXIT ;                                                /* 0x0 */
        /*00d0*/                   BRA 0xd0;                                             /* 0x0 */
        /*00e0*/                   I2F.U64.RP R8, R4 ;                                   /* 0x0 */
        /*00f0*/                   RET.REL.NODEC R8 0x0 ;                                /* 0x0 */
        /*0100*/                   MUFU.RSQ R8, R4 ;                                     /* 0x0 */
        /*0110*/                   RET.REL.NODEC R8 0x0 ;                                /* 0x0 */
		..........
"""  # noqa: E501  as the program prints it


@pytest.fixture
def dump() -> str:
    return DUMP
