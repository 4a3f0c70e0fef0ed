"""Classes of transformers that the zoo leaves out because they do not train in plain torch here, and why."""

from __future__ import annotations

from collections.abc import Mapping

CLASSES_BY_REASON: Mapping[str, str] = {
    "needs timm": """
        EdgeTamModel EdgeTamVisionModel FastVlmForConditionalGeneration
        Gemma3nForConditionalGeneration OmDetTurboForObjectDetection PeAudioVideoEncoder
        PeAudioVideoModel PeVideoEncoder PeVideoModel PerceptionLMForConditionalGeneration
        TimmBackbone TimmWrapperForImageClassification
    """,
    "needs scipy": """
        EomtDinov3ForUniversalSegmentation EomtForUniversalSegmentation
        InklingForConditionalGeneration Mask2FormerForUniversalSegmentation
        MaskFormerForInstanceSegmentation OneFormerForUniversalSegmentation
        VideomtForUniversalSegmentation
    """,
    "needs natten": """
        DinatBackbone DinatForImageClassification
    """,
    "needs detectron2": """
        LayoutLMv2ForQuestionAnswering LayoutLMv2ForSequenceClassification
        LayoutLMv2ForTokenClassification
    """,
    "needs torchaudio": """
        HiggsAudioV2TokenizerModel
    """,
    "needs diffusers": """
        VibeVoiceForConditionalGeneration
    """,
    "has no forward method": """
        BarkModel GlmImageVQVAE Qwen2_5OmniForConditionalGeneration
    """,
    "is listed but not exported by transformers": """
        VoxtralRealtimeTextModel
    """,
    "does not build or run from its default configuration": """
        Blip2ForImageTextRetrieval CHMv2ForDepthEstimation CohereCompassForCausalLM
        CohereCompassForConditionalGeneration CohereCompassTextForSequenceClassification
        DbrxForCausalLM DeepseekOcr2ForConditionalGeneration DiffusionGemmaForBlockDiffusion
        Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
        Granite4VisionForConditionalGeneration LwDetrForObjectDetection
        MoonshineStreamingForConditionalGeneration PPOCRV5ServerDetForObjectDetection
        PPOCRV6MediumDetForObjectDetection Qwen2_5OmniThinkerForConditionalGeneration
        Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
        Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration Sapiens2ForImageMatting
        Sapiens2ForNormalEstimation Sapiens2ForPointmapEstimation Sapiens2ForPoseEstimation
        Sapiens2ForSemanticSegmentation T5Gemma2Encoder
    """,
    "has sizes that the shrinking rules do not keep consistent": """
        ClapModel ClvpModelForConditionalGeneration DepthProForDepthEstimation Dots3NoteForCausalLM
        Dots3NoteForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration FunAsrNanoEncoder
        FunAsrNanoForConditionalGeneration Gemma4AudioModel NeuCodecModel PPLCNetV4Backbone
        PPOCRV5MobileDetForObjectDetection PPOCRV5MobileRecForTextRecognition
        PPOCRV5ServerRecForTextRecognition PPOCRV6SmallDetForObjectDetection
        PPOCRV6SmallRecForTextRecognition PPOCRV6TinyRecForTextRecognition Sam2Model SegGptModel
        TvpModel UVDocModel VibeVoiceAsrForConditionalGeneration VideoPrismClipModel
        VideoPrismForVideoClassification Xcodec2Model XcodecModel
    """,
    "needs inputs that the generic rules do not make": """
        Blip2QFormerModel DiaForConditionalGeneration FastSpeech2ConformerModel
        FastSpeech2ConformerWithHifiGan FlavaForPreTraining Gemma3nAudioEncoder Gemma4VisionModel
        Inkling2VisionModel InstructBlipVideoForConditionalGeneration JevForDecision
        KyutaiSpeechToTextForConditionalGeneration MimiDecoderModel MiniCPMOcrVisionModel
        MiniCPMV4_7VisionModel MuseGlimmerAssistantModel Nemotron3_5TranscribeWordTimestampModel
        PI0ForConditionalGeneration PPDocLayoutV2ForObjectDetection
        PocketTTSAudioTokenizerDecoderModel Qwen3ASREncoder Sam3TrackerVideoModel
        ShieldGemma2ForImageClassification VibeVoiceAcousticTokenizerDecoderModel
        VibeVoiceAcousticTokenizerEncoderModel VoxtralRealtimeForConditionalGeneration
    """,
    "takes more than 3 s": """
        BltForCausalLM EfficientLoFTRForKeypointMatching LightGlueForKeypointMatching
        SuperGlueForKeypointMatching VibeVoiceAcousticTokenizerModel
    """,
}

EXCLUDED: Mapping[str, str] = {
    class_name: reason for reason, names in CLASSES_BY_REASON.items() for class_name in names.split()
}
